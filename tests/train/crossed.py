"""Program of ``test_crossed.py``: ranks that wait in different collectives.

``python -m tests.train.crossed FOLDER`` writes a finalized run directory for each scenario into the folder.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

from torch import nn

from hpcrun import get_rank
from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.end.finalize import finalize
from hpcrun.lifecycle.policy import Budgets
from hpcrun.run.directory import create
from hpcrun.run.endings import Exit, record_exit
from hpcrun.run.events import Attempt
from tests.train import runs
from tests.train.forks import fork_ranks
from tests.train.zoo import Noisy, Regression

# Longer than a step may take when these ranks and other programs share two cores.
QUICK = ["train.hang_after=12", "train.hang_start=12"]
# A hang_start longer than the timeout of a collective.
LATE = ["train.timeout=16", "train.hang_after=6", "train.hang_start=18"]

RUNS = {
    "parameter": ["train.parallel=fsdp", "model.leaves_out=parameter"],
    "block": ["train.parallel=fsdp", "model.leaves_out=block", *QUICK],
    "at-once": ["train.parallel=fsdp", "model.leaves_out=block", "model.since=1"],
    "importing": ["model.leaves_out=importing", *QUICK],
    # Rank 0 prepares: for 48 times hang_start.
    "preparing": ["model.leaves_out=preparing", "train.hang_after=12", "train.hang_start=0.4"],
    "building": ["model.leaves_out=building", *QUICK],
    "wrapping": ["model.leaves_out=wrapping", "train.parallel=ddp", *LATE],
    "restoring": [
        *("train.parallel=ddp", "model.leaves_out=restoring", "model.since=99", "model.stop_at=3"),
        *QUICK,
    ],
    "reporting": ["model.leaves_out=reporting", "train.steps=2", *LATE],
    "first-pass": ["train.parallel=fsdp", "model.leaves_out=pass-1", *QUICK],
    "first-step": ["train.parallel=ddp", "model.leaves_out=pass-2", *LATE],
    "validating": [
        *("train.parallel=fsdp", "model.leaves_out=validating", "train.validate_every=1", *LATE)
    ],
    "copies": ["train.parallel=ddp", "model.leaves_out=parameter", "checkpoint.every=0"],
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen, self.shrink = nn.Linear(8, 9), nn.Linear(9, 8)

    def forward(self, x, whole=True):
        return self.shrink(self.widen(x)) if whole else self.widen(x)[:, :8]


class Net(nn.Module):
    """A task in which rank 1, from a given pass, skips part or all of the last block."""

    def __init__(self, leaves_out, since, compare_position):
        super().__init__()
        self.compare_position = compare_position
        self.register_load_state_dict_pre_hook(lambda *_: compare_position("restoring"))
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.leaves_out, self.since, self.passes = leaves_out, since, 0

    def to(self, *args, **kwargs):
        self.compare_position("wrapping")
        return super().to(*args, **kwargs)

    def forward(self, x):
        self.passes += self.training
        left_out = self.leaves_out if self.passes >= self.since and get_rank() == 1 else None
        first, last = self.blocks
        x = first(self.enter(x))
        return self.leave(x if left_out == "block" else last(x, left_out is None))


class LeavesOut(Regression):
    def __init__(self, config):
        super().__init__(config)
        self.compare_position("importing")

    def prepare(self):
        self.compare_position("preparing", rank=0)

    def build_model(self):
        wanted = self.config.model.own
        self.compare_position("building")
        return Net(wanted["leaves_out"], wanted.get("since", 4), self.compare_position)

    def validation_dataset(self):
        return Noisy(3)

    def loss(self, model, batch):
        if not model.training:
            self.compare_position("validating")
        return super().loss(model, batch)

    def mishap(self):
        self.compare_position(f"pass-{self.calls}")

    def report(self, model, validation_loss):
        self.compare_position("reporting", rank=0)
        return {}

    def compare_position(self, place, rank=1):
        if self.config.model.own["leaves_out"] == place and get_rank() == rank:
            time.sleep(600)


def play(name: str, folder: Path) -> None:
    """Run a scenario, again after a stop, and finalize it like a controller that sees the exits."""
    common = [*runs.COMMON, "task=tests.train.crossed:LeavesOut"]
    config = resolve([override_layer([*common, *RUNS[name]])])
    run = create(folder / name, to_yaml(config), {"created": time.time()})
    attempt, codes = Attempt(name, -1), [exitcodes.UNFINISHED] * 2
    while codes == [exitcodes.UNFINISHED] * 2:
        attempt = Attempt(name, attempt.restart + 1)
        logs = run.attempt_logs(name, attempt.restart)
        logs.mkdir(parents=True)
        codes = fork_ranks(2, partial(play_rank, run.path, attempt.restart, logs))
    for number, code in enumerate(codes):
        if code < 0:
            record_exit(logs, Exit(number, "local0", time.time(), None, -code, False))
    finalize(run, attempt, exitcodes.FAILED, Budgets(crash=0, hang=0))


def play_rank(run: Path, restart: int, logs: Path, number: int) -> None:
    log = os.open(logs / f"rank-{number:05d}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    runs.play(number, run, restart)


def main(folder: Path) -> int:
    """Run all scenarios in parallel, because some of them mostly wait."""
    names = list(RUNS)
    return int(any(fork_ranks(len(names), lambda number: play(names[number], folder))))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
