"""Substitutes that answer like Slurm's programs and record their calls, and a clock that does not wait."""

import shlex
from pathlib import Path

import pytest

from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.job.restart.requeue import Clock, requeue
from hpcrun.run.attempt import Attempt

FIRST = Attempt("7", 0)


class Desk:
    """A job's batch log and the programs of a Slurm that knows the job."""

    def __init__(self, folder: Path, state: str = "RUNNING") -> None:
        self.log, self.calls = folder / "batch-7.log", folder / "calls"
        self.log.touch()
        self.calls.touch()
        self.folder = folder
        self.answer("scancel", "")
        self.answer("scontrol", f"[ $1 = show ] && echo 'JobId=7 JobState={state} Restarts=0 '")

    def answer(self, program: str, script: str) -> None:
        calls = shlex.quote(str(self.calls))
        path = self.folder / program
        path.write_text(f'#!/bin/bash\necho "{program} $*" >> {calls}\n{script}\ntrue\n')
        path.chmod(0o755)

    def tells(self, *lines: str) -> str:
        """Return shell code that appends these lines to the batch log."""
        return "; ".join(
            f"echo {shlex.quote(line)} >> {shlex.quote(str(self.log))}" for line in lines
        )

    def word(self) -> str | None:
        return scheduler_word(self.log.read_text())

    def requeue(self) -> str:
        return requeue(FIRST, pytest.fail, self.word, patience=0.3)

    def asked(self) -> list[str]:
        return [call for call in self.calls.read_text().splitlines() if " show " not in call]


class Hours(Clock):
    """A clock that advances without waiting."""

    def __init__(self, desk: Desk) -> None:
        self.time, self.waits, self.desk = 0.0, list[float](), desk
        super().__init__(now=lambda: self.time, sleep=self.wait)

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.time += seconds
