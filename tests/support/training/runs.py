"""Whole runs of two ranks, for tests with ``@forked``: their exit codes, messages and files."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config

from hpcrun import exit_codes
from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.ranks.signals import STOP
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.endings import Failure, read_failures
from hpcrun.run.journal.events import Event
from hpcrun.train import session
from hpcrun.worker import leave, run_rank
from tests.support.journal import read_events
from tests.support.training.forks import fork_ranks

# Modules that every rank would import after the fork: DDP and the deterministic kernels import the compiler.
IMPORTED_ONCE = (session, torch._dynamo, torch._inductor)

COMMON = [
    "job.gpus=2",
    "job.cpu=true",
    "train.steps=8",
    "train.batch_size=8",
    "train.log_every=2",
    "train.timeout=30",
    "checkpoint.every=3",
    "optim.warmup_steps=2",
]

DONE = [[exit_codes.DONE] * 2]
STOPPED_ONCE = [[exit_codes.UNFINISHED] * 2, [exit_codes.DONE] * 2]
REFUSED = [[exit_codes.BAD_INPUT] * 2]
FAILED = [[exit_codes.FAILED] * 2]


class Played:
    """A run after its attempts: the exit codes of each, the seconds of all, and the files."""

    def __init__(self, run: RunDirectory, logs: Path, codes: list[list[int]], seconds: float):
        self.run, self.codes, self.seconds = run, codes, seconds
        self._logs = logs

    def said(self, rank: int = 0) -> str:
        """Return what a rank printed in all attempts."""
        return (self._logs / f"rank-{rank}.log").read_text()

    def line_with(self, part: str) -> str:
        """Return the only line of rank 0 that contains ``part``."""
        lines = [line for line in self.said().splitlines() if part in line]
        assert len(lines) == 1, lines
        return lines[0]

    def refusal(self) -> str:
        """Return the line that rank 0 prints in addition to the greeting.

        The event log has this line as well. Rank 1 prints no line of hpcrun; torch's C++ code may warn there
        about a connection that rank 0 has closed, with a stack whose paths can have hpcrun's name.
        """
        lines = [line for line in self.said().splitlines() if "over gloo" not in line]
        assert len(lines) == 1, lines
        told = self.said(rank=1)
        assert not [line for line in told.splitlines() if line.startswith("hpcrun")], told
        assert "Traceback" not in told, told
        line = lines[0].removeprefix("hpcrun: ")
        (event,) = self.events("bad-input")
        assert event.reason == line
        return line

    def events(self, what: str) -> list[Event]:
        """Return the events of a kind."""
        return [event for event in read_events(self.run) if event.tag == what]

    def failures(self, restart: int = 0) -> dict[int, Failure]:
        """Return the failures of an attempt, by rank."""
        folder = self.run.attempt_logs(Attempt(self.run.path.name, restart))
        return {failure.rank: failure for failure in read_failures(folder)}

    def kinds(self) -> set[str]:
        """Allow for both ranks failing: a rank may be gone before the other rank has its last gradients."""
        return {failure.kind for failure in self.failures().values()}


def play_run(
    folder: Path,
    task: type | str,
    *overrides: str,
    name: str = "run",
    later: tuple[str, ...] = (),
    begin: Callable[[int, int], object] | None = None,
    nodes: Sequence[int] = (),
    per_node: int = 1,
    victim: int = 0,
) -> Played:
    """Run a task on two ranks, again while it asks for a restart or ``victim`` was killed.

    Args:
        folder: receives the run directory ``name`` and its logs.
        task: a class, or its name in a config.
        later: overrides that a person changes after the first attempt.
        begin: called with the rank and the number of restarts, in each rank before it trains.
        nodes: the nodes of each attempt, with ``per_node`` ranks each; by default two ranks on one node.
    """
    task = task if isinstance(task, str) else f"{task.__module__}:{task.__qualname__}"
    layers = [*COMMON, f"task={task}", *overrides]
    run = create(folder / name, config_text(*layers), {"created": time.time()})
    logs = folder / f"{name}-logs"
    logs.mkdir()
    began = time.monotonic()
    attempts: list[list[int]] = []
    while not attempts or {*attempts[-1]} == {75} or attempts[-1][victim] == -signal.SIGKILL:
        restart = len(attempts)
        count, width = (nodes[restart], per_node) if nodes else (1, 2)
        if restart and later:
            run.config.write_text(config_text(*layers, *later))

        def play(rank: int, restart: int = restart, count: int = count, width: int = width) -> None:
            if begin is not None:
                begin(rank, restart)
            play_rank(rank, run.path, restart, count, width)

        attempts.append(fork_ranks(count * width, play, logs))
    return Played(run, logs, attempts, time.monotonic() - began)


def config_text(*overrides: Any) -> str:
    """Return the text of a resolved config."""
    return to_yaml(resolve([override_layer([*overrides])]))


def play_rank(rank: int, run: Path, restart: int, nodes: int = 1, per_node: int = 2) -> None:
    """Run as a task of the local cluster, with its variables, entry point and exit."""
    torch.set_num_threads(1)
    os.environ |= {
        "HPCRUN_LOCAL_CLUSTER": "1",
        "SLURM_JOB_ID": run.name,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"local[0-{nodes - 1}]",
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_RESTART_COUNT": str(restart),
        "OMP_NUM_THREADS": "1",
    }
    STOP.install()
    leave(run_rank(run, STOP))
