"""Rank of a function that Python submits (hpcrun/api/functions.py): ``python -m hpcrun.call FILE NUMBER``."""

import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hpcrun.run.directory import CALLS, is_own
from hpcrun.run.files import write_atomic


def main() -> None:
    """Call the function, and write its value or its exception for this rank."""
    run, rank = Path(os.environ["HPCRUN_RUN"]), int(os.environ.get("RANK", "0"))
    name, number = sys.argv[1:]
    calls = [path for path in (run / CALLS / name, run.parent / CALLS / name) if path.exists()]
    place = run / CALLS / f"rank-{rank:05d}.pkl"
    place.parent.mkdir(mode=0o700, exist_ok=True)
    place.unlink(missing_ok=True)  # of an earlier attempt
    facts: dict[str, Any] = {"ranks": int(os.environ.get("WORLD_SIZE", "1"))}
    try:
        facts["content"] = _packed(_value(calls[0], int(number)))
    except Exception as error:
        facts["error"], facts["time"] = traceback.format_exc(), time.time()
        try:
            facts["content"] = _packed(error)
        except Exception:  # of any type: an exception may hold what cannot be pickled
            facts["content"] = b""
        raise
    finally:
        if "content" in facts:  # not if the function exits, for example with 75
            write_atomic(place, pickle.dumps(facts))


def _value(calls: Path, number: int) -> Any:
    with calls.open("rb") as stream:
        if not is_own(os.fstat(stream.fileno()), calls):
            raise PermissionError(
                f"{calls}: belongs to another user, and its call would run as you"
            )
        # The function may need the path, which comes first.
        sys.path += [folder for folder in pickle.load(stream) if folder not in sys.path]
        function, arguments = pickle.load(stream)
    return function(*arguments[number])


def _packed(value: Any) -> bytes:
    import cloudpickle

    packed: bytes = cloudpickle.dumps(value)
    return packed


if __name__ == "__main__":
    main()
