"""The door of every rank: ``python -m hpcrun.worker RUN``, whatever launched it."""

import sys
from pathlib import Path

from hpcrun.lifecycle.signals import STOP


class Worker:
    """What a submitit job carries: the run directory's path and nothing else (invariant 1)."""

    def __init__(self, run: str) -> None:
        self.run = run

    def __call__(self) -> None:
        """Train; exit with the worker's code, which submitit would otherwise turn into 0."""
        # submitit has put its own handlers over ours, and they save and requeue on the spot.
        STOP.install()
        code = train_here(Path(self.run))
        if code:
            raise SystemExit(code)


def main() -> None:
    """Install the signal flags before anything slow, then train or hand over to submitit."""
    STOP.install()
    if sys.argv[1:2] == ["--submitit"]:
        from submitit.core.submission import process_job

        process_job(sys.argv[2])
        return
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m hpcrun.worker RUN_DIRECTORY")
    raise SystemExit(train_here(Path(sys.argv[1])))


def train_here(run: Path) -> int:
    """Train this process's share of ``run`` and return its exit code."""
    from hpcrun.train.job import run_rank

    return run_rank(run, STOP)


if __name__ == "__main__":
    main()
