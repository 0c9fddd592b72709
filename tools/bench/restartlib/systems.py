"""The compared systems: how each starts, and when its parts of a restart begin."""

import contextlib
import subprocess
import sys
from pathlib import Path

from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Event
from hpcrun.run.journal.journal import Journal
from restartlib.marks import begun_at
from restartlib.place import Mark, Place, programs

NODES, RANKS = 2, 2
PARTS = ("end", "decide", "start", "import", "join", "restore", "step")
LIMIT = 5
"""Seconds without progress after which a watchdog takes a rank for hanging."""
_NEVER = ("crash", "hang", "node_failure", "no_progress", "same_step")


class Hpcrun:
    """A run of hpcrun, with restarts inside the allocation or by a requeue only."""

    def __init__(self, place: Place, *, in_place: bool, spares: int = 0) -> None:
        self.place = place
        self.options = [f"restarts.in_place={str(in_place).lower()}"]
        self.options += ["--spares", str(spares)] if spares else []
        self.run = RunDirectory(place.folder / "runs" / "bench")

    def start(self) -> None:
        """Submit the run."""
        settings = {
            "task": "restartlib.task:Marked", "train.steps": 1_000_000, "train.batch_size": 32,
            "train.hang_after": LIMIT, "checkpoint.every": 10, "job.exclude_after": "null",
            **{f"restarts.{cause}": "null" for cause in _NEVER},
        }  # fmt: skip
        shape = ["--nodes", str(NODES), "--gpus", str(RANKS), "--cpu", "--executor", "slurm"]
        self.place.slurm.run(
            [
                *(sys.executable, "-m", "hpcrun", "submit", "--name", "bench", "--no-snapshot"),
                *(*shape, "--detach", *self.options),
                *(f"{key}={value}" for key, value in settings.items()),
            ],
            cwd=self.place.folder,
            env=self.place.environ(),
        )  # fmt: skip

    def saves(self) -> int:
        """Return the number of committed saves."""
        return sum(event.tag == "saved" for event in self._events())

    def launchers(self) -> list[int]:
        """Return the processes that end with the ranks: srun."""
        # Other clusters of this machine have processes of the same name.
        return programs("srun", f"--output={self.run.logs}")

    def parts(self, fault: float, srun: float, new: list[Mark], begun: float) -> dict[str, float]:
        """Return the time at which each part of the restart was over, in Unix seconds.

        Args:
            fault: the time of the fault.
            srun: the end of srun.
            new: the marks of the new rank 0.
            begun: the start of its process.
        """
        after = [event for event in self._events() if event.time > fault]
        return {
            "end": srun,
            "decide": _first(after, "ended"),
            "start": begun,
            "import": _first(after, "opened"),
            "join": _mark(new, "joined"),
            "restore": _first(after, "started"),
            "step": _mark(new, "step"),
        }

    def story(self) -> str:
        """Return the events and the end of the logs."""
        logs = sorted(self.run.logs.rglob("*.log"))
        told = [f"--- {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join([*map(str, self._events()), *told])

    def _events(self) -> list[Event]:
        return list(Journal(self.run).read().events) if self.run.events.exists() else []


class Launcher:
    """The same training as a plain script under a launcher that restarts its ranks itself."""

    def __init__(self, place: Place, module: str, options: list[str], path: Path | None) -> None:
        self.place, self.module, self.options, self.path = place, module, options, path

    def start(self) -> None:
        """Submit the script: one launcher per node."""
        folder = self.place.folder
        more = {"RESTART_BENCH_SAVED": str(folder / "saved.pt")}
        if self.path is not None:
            more["RESTART_BENCH_FT"] = "1"
        environ = self.place.environ(**more)
        if self.path is not None:
            environ["PYTHONPATH"] += f":{self.path}"
        launch = [
            *("srun", f"--output={folder}/launcher-%n.log", "--unbuffered", sys.executable, "-m"),
            *(self.module, f"--nnodes={NODES}", f"--nproc-per-node={RANKS}", "--max-restarts=100"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=$(hostname):29511", "--rdzv-id=bench"),
            *(*self.options, "-m", "restartlib.script"),
        ]
        self.place.slurm.sbatch(
            *(f"--nodes={NODES}", "--ntasks-per-node=1", "--cpus-per-task=2", "--time=30"),
            f"--output={folder}/batch.log",
            script=f"#!/bin/bash\n{' '.join(launch)}\n",
            cwd=folder,
            env=environ,
        )

    def saves(self) -> int:
        """Return the number of saves."""
        return sum(mark.what == "saved" for mark in self.place.marks())

    def launchers(self) -> list[int]:
        """Return no process: the launchers live on."""
        return []

    def parts(self, fault: float, srun: float, new: list[Mark], begun: float) -> dict[str, float]:
        """Return the time at which each part of the restart was over; see :class:`Hpcrun`."""
        return {
            "start": begun,
            "import": _mark(new, "imported"),
            "join": _mark(new, "joined"),
            "restore": _mark(new, "restored"),
            "step": _mark(new, "step"),
        }

    def story(self) -> str:
        """Return the end of the logs."""
        logs = sorted(self.place.folder.glob("*.log"))
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def torchrun(place: Place) -> Launcher:
    """Return the training under torchrun."""
    return Launcher(place, "torch.distributed.run", [], None)


def ft_launcher(place: Place, path: Path) -> Launcher:
    """Return the training under ft_launcher with its watchdog; ``path`` is the folder of its package."""
    limits = ["--ft-initial-rank-heartbeat-timeout=120", f"--ft-rank-heartbeat-timeout={LIMIT}"]
    options = [*limits, "--ft-workload-check-interval=0.5"]
    return Launcher(place, "nvidia_resiliency_ext.fault_tolerance.launcher", options, path)


def install_ft_launcher(folder: Path) -> str | None:
    """Install nvidia-resiliency-ext into ``folder``; return why it cannot be used, None if it can.

    Without its dependencies: it would replace the torch of this Python.
    """
    names = ["nvidia-resiliency-ext", "defusedxml", "nvidia-ml-py"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run(
        [*command, str(folder / "packages"), *names], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        look = "import nvidia_resiliency_ext.fault_tolerance.launcher"
        env = {"PYTHONPATH": str(folder / "packages")}
        done = subprocess.run(
            [sys.executable, "-c", look], env=env, capture_output=True, text=True, check=False
        )
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines or [f"exit code {done.returncode}"])[-1]


def process_start(pid: int) -> float:
    """Return the start of the process in Unix seconds; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return begun_at(pid)
    return 0.0


def _first(events: list[Event], what: str) -> float:
    return next((event.time for event in events if event.tag == what), 0.0)


def _mark(marks: list[Mark], what: str) -> float:
    return next((mark.time for mark in marks if mark.what == what), 0.0)
