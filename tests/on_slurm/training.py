"""Runs of the probe task on the real Slurm, submitted and read as the ordinary user."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json, read_lines
from tests.support import jobs
from tests.support.journal import read_events
from tests.support.start_server import COMMANDS

from .cluster import FINAL_STATES, PATIENCE, SlurmCluster

ROOT = Path(__file__).resolve().parents[2]

WATCHED = '''

import psutil, socket


class Watched(Probe):
    """Write the host, the connections and the environment of each rank to a file."""

    def note(self, indices):
        super().note(indices)
        self.seen = getattr(self, "seen", 0) + 1
        if self.seen != 3:
            return
        talks = [c for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"]
        facts = {
            "host": socket.gethostname(),
            "own": sorted({c.laddr.ip.removeprefix("::ffff:") for c in talks}),
            "peers": sorted({c.raddr.ip.removeprefix("::ffff:") for c in talks}),
            "environ": dict(os.environ),
        }
        with open(os.path.join(self.config.data.own["log"], "facts-" + os.environ["RANK"]), "w") as out:
            json.dump(facts, out)
'''

_numbers = itertools.count()


class Bench:
    """A folder of the job user on the shared file system, from which it submits probe runs."""

    def __init__(self, slurm: SlurmCluster, name: str | None = None) -> None:
        self.slurm = slurm
        self.folder = slurm.shared / (name or f"bench-{next(_numbers)}")
        self.folder.mkdir(parents=True)
        (self.folder / "probe.py").write_text(jobs.PROBE + WATCHED)
        (self.folder / "empty.yaml").write_text("{}\n")
        user = slurm.shared.stat()
        for path in (self.folder, *self.folder.iterdir()):
            os.chown(path, user.st_uid, user.st_gid)

    def command(self, *arguments: str) -> list[str]:
        """Return the argument list of `hpcrun`."""
        return [sys.executable, "-m", "hpcrun", *arguments]

    def environ(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return variables that select this checkout, one thread per rank and a separate bad-node list."""
        return {
            **{"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(self.folder)},
            # The number of threads changes the bits of a sum. Long states need a wide table.
            **{"OMP_NUM_THREADS": "1", "COLUMNS": "200", **(env or {})},
        }

    def hpcrun(
        self,
        *arguments: str,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
    ) -> subprocess.CompletedProcess[str]:
        """Run `hpcrun` on the login host, in the folder."""
        return self.slurm.run(
            self.command(*arguments),
            cwd=self.folder,
            env={COMMANDS: "1", **self.environ(env)},
            timeout=timeout,
            check=check,
        )

    def settings(self, **changes: Any) -> list[str]:
        """Return overrides for a short run."""
        settings = {
            "job.executor": "slurm",
            # Imports take seconds of processor time for each rank.
            "job.gpus": 1,
            "job.mem": "1G",
            "data.log": str(self.folder),
            "checkpoint.every": 10,
            **changes,
        }
        return jobs.probe_config(self.folder, **settings)

    def arguments(self, name: str, *arguments: str, **changes: Any) -> list[str]:
        """Return the command line of a submission."""
        settings = self.settings(**changes)
        return ["submit", "-c", "empty.yaml", "--name", name, *arguments, *settings]

    def submit(self, name: str, *arguments: str, **changes: Any) -> RunDirectory:
        """Submit a run without following it."""
        self.hpcrun(*self.arguments(name, *arguments, **changes))
        return self.run(name)

    def run(self, name: str) -> RunDirectory:
        """Return the run of that name, as the test process reads it."""
        return RunDirectory(self.folder / "runs" / name)

    def job(self, run: RunDirectory) -> str:
        """Return the id of the run's newest job."""
        told = [event for event in read_events(run) if event.tag == "submitted"]
        assert told
        assert told[-1].attempt is not None
        return told[-1].attempt.job

    def wait_for_step(self, run: RunDirectory, step: int, restart: int | None = None) -> None:
        """Wait until rank 0 has logged ``step``."""

        def reached() -> bool:
            lines = read_lines(run.metrics)
            return any(
                line["step"] >= step and restart in (None, line.get("restart")) for line in lines
            )

        self.wait_until(reached, PATIENCE, lambda: f"step {step}: {self.story(run)}")

    @contextlib.contextmanager
    def held_at(self, run: RunDirectory, step: int, restart: int | None = None) -> Iterator[None]:
        """Hold the run at ``step`` until the block ends."""
        self.wait_for_step(run, step, restart)
        with jobs.held(run):
            yield

    def wait_for_end(self, run: RunDirectory, timeout: float = PATIENCE) -> str:
        """Wait for the run's result and its job's end; return Slurm's state."""

        def over() -> bool:
            # A job that ended without a result of the run will not write one later.
            return run.result.exists() or self.slurm.state(self.job(run)) in FINAL_STATES

        self.wait_until(over, timeout, lambda: self.story(run))
        return self.slurm.wait_state(self.job(run), FINAL_STATES, timeout)

    def wait_until(
        self, condition: Callable[[], bool], timeout: float, explain: Callable[[], str]
    ) -> None:
        """Wait like the cluster's method, with the story in the message of a failure."""
        self.slurm.wait_until(condition, timeout, explain)

    def story(self, run: RunDirectory) -> str:
        """Return logs and events of a run, for the message of a failed test."""
        texts = [run.events, *sorted(run.logs.glob("*.log"))]
        told = "\n".join(path.read_text(errors="replace") for path in texts if path.exists())
        queue = self.slurm.admin("squeue", "--states=all")
        return f"{run.name} does not end:\n{told}\n{queue}"

    def causes(self, run: RunDirectory) -> list[str | None]:
        """Return the causes of all ended attempts, in order."""
        return [event.cause for event in jobs.events(run, "ended")]

    def result(self, run: RunDirectory) -> dict[str, Any]:
        """Return result.json."""
        return read_json(run.result) or {}

    def facts(self, rank: int) -> dict[str, Any]:
        """Return the facts that the probe of a rank wrote."""
        return dict(json.loads((self.folder / f"facts-{rank}").read_text()))

    def batch_log(self, run: RunDirectory) -> str:
        """Return the output of the batch script and of Slurm's daemons."""
        return (run.logs / f"batch-{self.job(run)}.log").read_text(errors="replace")

    def pids(self, run: RunDirectory, rank: int) -> list[int]:
        """Return the process of a rank, found by its environment."""
        job = self.job(run)
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environ = (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            mine = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()}
            here = f"SLURM_CLUSTER_NAME={self.slurm.name}".encode()
            # srun has the same command line, and rank 0's number from the batch script.
            ours = b"hpcrun.worker" in words and not words[0].endswith(b"srun")
            if ours and mine <= set(environ) and here in environ:
                found.append(int(folder.name))
        # A rank's helper processes have the same command line.
        return [pid for pid in found if psutil.Process(pid).ppid() not in found]

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
