"""The program that ``test_crossed.py`` starts: ranks that do not come to each other.

``python -m tests.train.crossed FOLDER`` leaves a settled run directory for each way in the folder.
"""

import os
import sys
import time
from pathlib import Path

from torch import nn

from hpcrun import get_rank
from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.policy import Budgets
from hpcrun.lifecycle.settle import settle
from hpcrun.run.directory import create
from hpcrun.run.endings import Exit, record_exit
from hpcrun.run.events import Attempt
from tests.train import runs
from tests.train.forks import fork_ranks
from tests.train.zoo import Noisy, Regression

# Longer than ranks that share their cores with all the others may take for a step.
QUICK = ["train.hang_after=5", "train.hang_start=5"]
# What may take longer than a collective.
LATE = ["train.timeout=8", "train.hang_after=2", "train.hang_start=9"]

RUNS = {
    "parameter": ["train.parallel=fsdp", "model.leaves_out=parameter"],
    "block": ["train.parallel=fsdp", "model.leaves_out=block", *QUICK],
    "at-once": ["train.parallel=fsdp", "model.leaves_out=block", "model.since=1"],
    "building": ["model.leaves_out=building", *QUICK],
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
    """From one pass on, rank 1 leaves out a part of the last block, or all of it."""

    def __init__(self, leaves_out, since):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.leaves_out, self.since, self.passes = leaves_out, since, 0

    def forward(self, x):
        self.passes += self.training
        left_out = self.leaves_out if self.passes >= self.since and get_rank() == 1 else None
        first, last = self.blocks
        x = first(self.enter(x))
        return self.leave(x if left_out == "block" else last(x, left_out is None))


class LeavesOut(Regression):
    def build_model(self):
        wanted = self.config.model.own
        self.come_to("building")
        return Net(wanted["leaves_out"], wanted.get("since", 4))

    def validation_dataset(self):
        return Noisy(3)

    def loss(self, model, batch):
        if not model.training:
            self.come_to("validating")
        return super().loss(model, batch)

    def mishap(self):
        self.come_to(f"pass-{self.calls}")

    def come_to(self, place):
        if self.config.model.own["leaves_out"] == place and get_rank() == 1:
            time.sleep(600)


def play(name: str, folder: Path) -> None:
    """Play one way and settle it, as a controller that sees the processes end."""
    common = [*runs.COMMON, "task=tests.train.crossed:LeavesOut"]
    config = resolve([override_layer([*common, *RUNS[name]])])
    run = create(folder / name, to_yaml(config), {"created": time.time()})
    logs = run.attempt_logs(name, 0)
    logs.mkdir(parents=True)

    def rank(number: int) -> None:
        log = os.open(logs / f"rank-{number:05d}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        runs.play(number, run.path, 0)

    for number, code in enumerate(fork_ranks(2, rank)):
        if code < 0:
            record_exit(logs, Exit(number, "local0", time.time(), None, -code, False))
    settle(run, Attempt(name, 0), exitcodes.FAILED, Budgets(crash=0, hang=0))


def main(folder: Path) -> int:
    """Play all ways at once, since some of them mostly wait."""
    names = list(RUNS)
    return int(any(fork_ranks(len(names), lambda number: play(names[number], folder))))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
