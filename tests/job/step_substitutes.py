"""A run, and substitutes for Slurm's programs that know its job, for tests of the batch step."""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrun.config import Config, to_yaml
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import create
from hpcrun.slurm.notation import AGENTS
from tests.support.journal import read_events

ROOT = Path(__file__).resolve().parents[2]
FIRST = Attempt("7", 0)
SHOWN = (
    "JobId=7 JobName=x\\n   JobState=RUNNING Reason=None\\n   Requeue=1 Restarts=0 BatchFlag=1\\n"
    "   NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*\\n"
)

REQUEUED = (
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:48:15 DUE TO JOB REQUEUE ***"
)


class Desk:
    """A run and the programs of a Slurm that knows job 7."""

    def __init__(
        self,
        folder: Path,
        *,
        watch: Mapping[str, Any] | None = None,
        restarts: Mapping[str, Any] | None = None,
        **job: Any,
    ) -> None:
        sections = {"job": job, "watch": watch or {}, "train": {"batch_size": 64}}
        sections["restarts"] = restarts or {}
        config = Config.model_validate(sections)
        self.run = create(folder / "a run", to_yaml(config), {})
        self.run.logs.mkdir(exist_ok=True)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        self.calls.touch()
        self.answer("srun", "exit 0")
        self.answer("scontrol", f"[ $1 = show ] && [ $2 = job ] && printf '{SHOWN}'; true")
        self.answer("scancel", "")
        self.answer("sinfo", "")
        self.answer("squeue", "")

    def answer(self, program: str, script: str) -> None:
        stand_in = self.bin / program
        calls = shlex.quote(str(self.calls))
        # This Slurm starts no node agents.
        agents = f'[[ "$*" != *{AGENTS}* ]] || exit 1\n'
        said = f'#!/bin/bash\n{agents}echo "{program} $*" >> {calls}\n'
        # As slurmstepd: the end of the job by its requeue has a message in the batch log.
        log = shlex.quote(str(self.run.logs / "batch-7.log"))
        told = f"[ $code != 0 ] || [ \"$1\" != requeue ] || echo '{REQUEUED}' >> {log}"
        if program == "scontrol":
            script = f"(\n{script}\n)\ncode=$?\n{told}\nexit $code"
        stand_in.write_text(f"{said}{script}\n")
        stand_in.chmod(0o755)

    def start(
        self,
        *options: str,
        output: Path | None = None,
        command: Sequence[str] = (),
        **environ: str,
    ) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [
                *(sys.executable, "-m"),
                *(command or ("hpcrun", "batch", str(self.run.path))),
                *options,
            ],
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "PYTHONPATH": str(ROOT),
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "n[1-2]",
                "HOME": str(self.calls.parent),
                **environ,
            },
            stdin=subprocess.DEVNULL,
            # As in a batch script: Slurm's and hpcrun's lines go to the log that the classification reads.
            stdout=(output or self.run.logs / "batch-7.log").open("a"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def step(self, *options: str, **environ: str) -> int:
        return self.start(*options, **environ).wait(timeout=300)

    def told(self) -> str:
        return (self.run.logs / "batch-7.log").read_text()

    def called(self, program: str) -> list[str]:
        lines = self.calls.read_text().splitlines()
        return [line for line in lines if line.split()[0] == program]

    def ends(self) -> list[str | None]:
        return [event.cause for event in read_events(self.run) if event.tag == "ended"]
