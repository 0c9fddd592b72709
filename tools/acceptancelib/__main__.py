"""Run a check, or a rank of a check: ``python acceptancelib JOB RESULT [RANK]``.

JOB is JSON, RESULT the file for the outcomes. Device state, NCCL's variables and a crash of a check end
with its process.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1]), str(HERE.parents[1] / "bench")]
# cuBLAS is deterministic with a fixed workspace only, and reads this variable at its first use.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from acceptancelib.outcome import CHECKS, REPORT, Job, Outcome  # noqa: E402


def perform(job: Job) -> list[Outcome]:
    """Return the outcomes of the check; an exception is a failure."""
    try:
        outcomes: list[Outcome] = _module(job).check(job)
    except Exception as error:  # any failure: the other checks can still run
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        line = f"{type(error).__name__}: {lines[0][:200]}"
        return [Outcome(job.check, "fail", line, REPORT, {"traceback": traceback.format_exc()})]
    return outcomes


def perform_rank(job: Job, rank: int) -> Any:
    """Return the result of one rank of the check."""
    from acceptancelib.world import member

    with member(job, rank) as here:
        return _module(job).rank(here)


def _module(job: Job) -> Any:
    return importlib.import_module(f"acceptancelib.{CHECKS[job.check].module}")


def main() -> None:
    """Write the result of the check or of the rank."""
    # An exception, so that a check ends its runs and ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    job, result = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    if len(sys.argv) > 3:
        found = perform_rank(job, int(sys.argv[3]))
    else:
        found = [asdict(outcome) for outcome in perform(job)]
    result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
