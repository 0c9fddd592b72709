"""The program of test jobs: ``python -m tests.slurm.launch.local_tasks RESULTS FUNCTION ARGUMENTS``.

A task writes the function's result as JSON to the folder RESULTS.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def slurm_variables() -> dict[str, str]:
    """Return Slurm's variables that a task sees."""
    return {name: value for name, value in os.environ.items() if name.startswith("SLURM")}


def say_which(fails: int | None = None) -> str:
    """Return the task's rank; task ``fails`` ends with exit code 7 instead."""
    rank = int(os.environ["SLURM_PROCID"])
    if rank == fails:
        os._exit(7)
    if fails is not None:
        # Longer than any test waits for the end of the job.
        time.sleep(600)
    return f"{rank} with {os.environ.get('MARK', '')}"


def wait_for_signal(folder: str) -> str:
    """Write a file, sleep until SIGTERM or SIGUSR2 comes, and write which signal came."""
    got: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, _: got.append(number))
    rank, life = os.environ["SLURM_PROCID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR2])
    (Path(folder) / f"ready-{rank}-{life}").touch()
    deadline = time.monotonic() + 600
    while not got and life == "0" and time.monotonic() < deadline:
        time.sleep(0.02)
    said = Path(folder) / f"{rank}-{life}"
    said.write_text(" ".join(map(str, got)))
    # Renamed when complete, because a test waits for the name.
    said.rename(said.with_name(f"got-{said.name}"))
    return life


if __name__ == "__main__":
    results, name, *given = sys.argv[1:]
    value = globals()[name](*map(json.loads, given))
    (Path(results) / f"{os.environ['SLURM_PROCID']}.json").write_text(json.dumps(value))
