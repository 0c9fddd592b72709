"""Whole runs on the real Slurm, prepared and submitted by hand as an ordinary user does."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_lines
from tests.support import jobs
from tests.support.start_server import COMMANDS

from .cluster import PATIENCE, SlurmCluster

SBATCH = Path(__file__).resolve().parents[2] / "sbatch"
ENDED = 600.0  # seconds: two slow cores with other work, and a requeue takes 7 s


class Bench:
    """A folder of the job user to prepare and submit runs of the probe task."""

    def __init__(self, slurm: SlurmCluster) -> None:
        self.slurm = slurm
        self._asked: dict[str, list[str]] = {}
        self.folder = slurm.shared / f"bench-{secrets.token_hex(4)}"
        slurm.run(["mkdir", str(self.folder)])
        self.write("probe.py", jobs.PROBE)
        self.write("empty.yaml", "{}\n")

    def write(self, name: str, text: str) -> Path:
        """Write a file of the job user into the folder."""
        path = self.folder / name
        self.slurm.run(["tee", str(path)], stdin=text)
        return path

    def hpcrun(self, *arguments: str, check: bool = True, timeout: float = PATIENCE) -> str:
        """Return the output of `hpcrun` and its errors, run by the job user in the folder."""
        done = self.slurm.run(
            [self.slurm.python, "-m", "hpcrun", *arguments],
            cwd=self.folder,
            env={COMMANDS: "1", **self.environment()},
            check=check,
            timeout=timeout,
        )
        return done.stdout + done.stderr

    def environment(self) -> dict[str, str]:
        """Return the variables of an activated virtual environment, with one thread per rank."""
        binaries = Path(self.slurm.python).parent
        return {
            "PATH": f"{binaries}:{self.slurm.path}",
            # The checkout under test comes before an installed package.
            "PYTHONPATH": str(SBATCH.parent),
            "OMP_NUM_THREADS": "1",
        }

    def prepare(self, name: str, *arguments: str, **changes: Any) -> RunDirectory:
        """Make a run directory of the probe task without submitting it."""
        settings = jobs.probe_config(self.folder, **changes)
        self._asked[name] = ["-c", "empty.yaml", "--name", name, *settings, *arguments]
        self.hpcrun("submit", "--prepare", *self.same(name))
        return self.run(name)

    def submit(self, name: str, *arguments: str) -> RunDirectory:
        """Submit two nodes of two ranks to Slurm with `hpcrun submit`."""
        shape = ("--nodes", "2", "--gpus", "2", "--cpu", "--executor", "slurm", "--detach")
        self.hpcrun("submit", *shape, "--name", name, "--no-snapshot", *arguments)
        return RunDirectory(self.folder / "runs" / name)

    def run(self, name: str) -> RunDirectory:
        """Return the run of that name."""
        return RunDirectory(self.folder / "runs" / name)

    def same(self, name: str) -> list[str]:
        """Return the arguments that prepared a run."""
        return [*self._asked[name], "--no-snapshot"]

    def sbatch(self, *arguments: str) -> str:
        """Submit from the folder; return the job's id."""
        return self.slurm.sbatch(*arguments, cwd=self.folder, env=self.environment())

    def preempt_everything(self) -> None:
        """Take all nodes for a short time with an urgent job."""
        with self.all_nodes_taken():
            pass

    @contextlib.contextmanager
    def all_nodes_taken(self) -> Iterator[None]:
        """Take all nodes with an urgent job, wait until it runs, and keep them until the block ends."""
        free = self.folder / "free"
        free.unlink(missing_ok=True)
        held = f"until [ -e {free} ]; do sleep 0.1; done"
        urgent = self.sbatch("--partition=urgent", "--nodes=4", "--exclusive", "--wrap", held)
        self.slurm.wait_state(urgent, "RUNNING", timeout=ENDED)
        try:
            yield
        finally:
            free.touch()
        self.slurm.wait_state(urgent, timeout=ENDED)

    def wait_for_step(self, run: RunDirectory, step: int, restart: int = 0) -> None:
        """Wait until rank 0 has logged ``step`` in attempt ``restart``."""

        def reached() -> bool:
            lines = read_lines(run.metrics)
            return any(x["step"] >= step and x.get("restart") == restart for x in lines)

        self.slurm.wait_until(reached, ENDED, lambda: f"step {step}: {self.told(run)}")

    @contextlib.contextmanager
    def held_at(self, run: RunDirectory, step: int, restart: int = 0) -> Iterator[None]:
        """Hold the run at ``step`` until the block ends."""
        self.wait_for_step(run, step, restart)
        with jobs.held(run):
            yield

    def wait_for_end(self, job: str, state: str = "COMPLETED") -> None:
        """Wait until the job is in ``state``; a requeued job passes through other final states."""
        self.slurm.wait_until(
            lambda: self.slurm.state(job) == state,
            ENDED,
            lambda: f"job {job} is {self.slurm.state(job)}, not {state}",
        )

    def status(self, name: str) -> dict[str, Any]:
        """Return the output of `hpcrun status` about one run."""
        row: dict[str, Any] = json.loads(self.hpcrun("status", "--json", name))
        return row

    def told(self, run: RunDirectory) -> str:
        """Return all logs of the run, for a failing test."""
        logs = [path for path in run.path.rglob("*.log") if path.is_file()]
        texts = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
        return "\n".join([json.dumps(read_lines(run.events), indent=1)[-3000:], *texts])
