#!/usr/bin/env python3
"""Measure how long the journal of a run takes to decode with several libraries.

    tools/bench/journal.py [--events 5000]

Prints CPU milliseconds, the best of seven, for a log with checksums that were checked before, and
for the first definition of five classes. msgspec is measured if it is installed; hpcrun does not need it.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional, Union

import orjson
import pydantic

from hpcrun.run.journal.events import to_events

# Fields of five kinds, each with a type and an example.
FIELDS: dict[str, dict[str, tuple[Any, Any]]] = {
    "opened": {"host": (str, "n1"), "script": (bool, False), "ranks": (int, 8), "nodes": (int, 2)},
    "started": {"ranks": (int, 8), "accumulation": (int, 1), "parallel": (str, "fsdp")},
    "saved": {"seconds": (float, 0.01), "written_seconds": (float, 0.3), "bytes": (int, 12345)},
    "slow": {"host": (str, "n1"), "rank": (int, 3), "ratio": (float, 1.5)},
    "ended": {
        "exit_code": (int, 1),
        "reason": (str, "ValueError: bad"),
        "restart_allowed": (bool, True),
        "decision": (str, "restart 1 after crashes (3 allowed)"),
    },
}


def best(function: Callable[[], object], calls: int = 7) -> str:
    """Return the CPU milliseconds of the best of several calls."""
    found = []
    for _ in range(calls):
        begun = time.process_time()
        function()
        found.append(time.process_time() - begun)
    return f"{1000 * min(found):6.1f} ms"


def written(count: int) -> list[bytes]:
    """Return ``count`` lines of a log with attempts of 50 events."""
    lines = []
    for number in range(count):
        tag = [*FIELDS][number % len(FIELDS)]
        values = {name: value for name, (_, value) in FIELDS[tag].items()}
        place = {"job": str(number // 50), "restart": number // 10 % 5, "step": number}
        lines.append(orjson.dumps({"time": 1.7e9 + number, "event": tag, **place, **values}))
    return lines


def pydantic_adapter() -> pydantic.TypeAdapter[Any]:
    """Return a tagged union of five models."""
    common: dict[str, Any] = {"time": (float, 0.0), "job": (str, ""), "restart": (int, 0)}
    models = [
        pydantic.create_model(
            tag,
            event=(Literal[tag], tag),
            **common,
            **{name: (Optional[kind], None) for name, (kind, _) in fields.items()},  # noqa: UP045
        )
        for tag, fields in FIELDS.items()
    ]
    union = Annotated[Union[tuple(models)], pydantic.Field(discriminator="event")]  # noqa: UP007
    return pydantic.TypeAdapter(union)


def msgspec_decoder() -> Any:
    """Return the decoder of a union of five tagged Structs; raises ImportError without msgspec."""
    import msgspec  # type: ignore[import-not-found]

    common = [("time", float, 0.0), ("job", str, ""), ("restart", int, 0)]
    structs = [
        msgspec.defstruct(
            tag,
            [*common, *((name, kind | None, None) for name, (kind, _) in fields.items())],
            tag_field="event",
            tag=tag,
            frozen=True,
        )
        for tag, fields in FIELDS.items()
    ]
    return msgspec.json.Decoder(Union[tuple(structs)])  # noqa: UP007


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=5000)
    lines = written(parser.parse_args().events)
    joined = b"[" + b",".join(lines) + b"]"
    print("json                ", best(lambda: json.loads(joined)))
    print("orjson              ", best(lambda: orjson.loads(joined)))
    print("json, hpcrun's      ", best(lambda: to_events(json.loads(joined))))
    print("orjson, hpcrun's    ", best(lambda: to_events(orjson.loads(joined))))
    # The first definition is the one that a command pays.
    print("pydantic, definition", best(pydantic_adapter, 1))
    adapter = pydantic_adapter()
    print("pydantic            ", best(lambda: [adapter.validate_json(line) for line in lines]))
    try:
        print("msgspec, definition ", best(msgspec_decoder, 1))
    except ImportError:
        print("msgspec is not installed")
        return
    decoder = msgspec_decoder()
    print("msgspec             ", best(lambda: [decoder.decode(line) for line in lines]))


if __name__ == "__main__":
    main()
