"""The end of runs in which ranks wait in different collectives, or in none."""

import os
import re
import time
from functools import partial

from torch import nn

from hpcrun import exit_codes, get_rank
from hpcrun.job.finalize import finalize
from hpcrun.job.policy import Budgets
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import create
from hpcrun.run.endings import Exit, record_exit
from hpcrun.run.files import read_json
from tests.support.on_ranks import forked
from tests.support.training import runs
from tests.support.training.faulty_tasks import Noisy, Regression
from tests.support.training.forks import fork_ranks

# Longer than a step may take when these ranks and other programs share two cores.
QUICK = "train.hang_after=12 train.hang_start=12"
# A hang_start longer than the timeout of a collective.
LATE = "train.timeout=16 train.hang_after=6 train.hang_start=18"


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


def play(folder, name, overrides):
    """Run a scenario, again after a stop, and finalize it like a controller that sees the exits."""
    task = f"task={LeavesOut.__module__}:{LeavesOut.__qualname__}"
    config = runs.config_text(*runs.COMMON, task, *overrides.split())
    run = create(folder / name, config, {"created": time.time()})
    attempt, codes = Attempt(name, -1), [exit_codes.UNFINISHED] * 2
    while codes == [exit_codes.UNFINISHED] * 2:
        attempt = Attempt(name, attempt.restart + 1)
        logs = run.attempt_logs(Attempt(name, attempt.restart))
        logs.mkdir(parents=True)
        codes = fork_ranks(2, partial(play_rank, run.path, attempt.restart, logs))
    for number, code in enumerate(codes):
        if code < 0:
            record_exit(logs, Exit(number, "local0", time.time(), None, -code, False))
    finalize(run, attempt, exit_codes.FAILED, Budgets(crash=0, hang=0))


def play_rank(run, restart, logs, number):
    log = os.open(logs / f"rank-{number:05d}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    runs.play_rank(number, run, restart)


def require_ends(folder, scenarios):
    """Play all scenarios at the same time, because they mostly wait, and compare their causes and reasons.

    ``scenarios``: by name, the overrides, the cause, and the start of the reason as a pattern.
    """
    names = list(scenarios)
    played = fork_ranks(len(names), lambda n: play(folder, names[n], scenarios[names[n]][0]))
    assert played == [0] * len(names)
    wrong = {}
    for name, (_, cause, reason) in scenarios.items():
        result = read_json(folder / name / "result.json")
        same = (result["state"], result["cause"]) == ("failed", cause)
        if not same or not re.match(reason, result["reason"]):
            wrong[name] = {key: result[key] for key in ("state", "cause", "reason")}
    assert not wrong


@forked
def test_the_first_cause_is_reported_with_a_remedy(tmp_path):
    scenarios = {
        "parameter": (
            "train.parallel=fsdp model.leaves_out=parameter",
            "crash",
            r"rank [01] on local0 was killed by SIGABRT: Received data size doesn't match expected size: "
            r"ranks came to different collectives; .*; under fsdp run the same blocks on "
            r"all ranks; .* \(1 other ",
        ),
        "block": (
            f"train.parallel=fsdp model.leaves_out=block {QUICK}",
            "hang",
            r"no progress for .* in step 3: rank 0 on \S+ came to all_gather of \d+ at \S+ in _backward; "
            r"rank 1 on \S+ came to \S+ of \d+ at \S+ in _backward; these never meet; ",
        ),
        "at-once": (
            "train.parallel=fsdp model.leaves_out=block model.since=1",
            "bad-input",
            r"train.parallel: under fsdp the ranks gather weights .* but rank 0 reaches blocks.1 while "
            r"rank 1 \(\S+\) reaches the end of its forward pass; ",
        ),
        "building": (
            f"model.leaves_out=building {QUICK}",
            "hang",
            r"no progress for .* before the first step: rank 1 on \S+ is behind, building the model and its "
            r"data at test_hangs.py:\d+ in compare_position; ",
        ),
        # This rank has begun nothing in the group in which the other ranks compare.
        "first-pass": (
            f"train.parallel=fsdp model.leaves_out=pass-1 {QUICK}",
            "hang",
            r"no progress for .* in step 0: rank 1 on \S+ is behind, training at "
            r"test_hangs.py:\d+ in comp\w+",
        ),
        # The collectives wait for the watchdog.
        "first-step": (
            f"train.parallel=ddp model.leaves_out=pass-2 {LATE}",
            "hang",
            r"no progress for .* in step 0: rank 1 on \S+ is behind, training at "
            r"test_hangs.py:\d+ in comp\w+",
        ),
        "validating": (
            f"train.parallel=fsdp model.leaves_out=validating train.validate_every=1 {LATE}",
            "hang",
            r"no progress for .* in step 0: rank 1 on \S+ is behind, validating at "
            r"test_hangs.py:\d+ in comp\w+",
        ),
        "copies": (
            "train.parallel=ddp model.leaves_out=parameter checkpoint.every=0",
            "crash",
            r"rank 1 on \S+: RuntimeError: Expected to have finished reduction in the prior iteration: "
            r".* set train.find_unused_parameters=true; otherwise remove them from the model \(1 other rank ",
        ),
    }
    require_ends(tmp_path, scenarios)


@forked
def test_a_hang_outside_the_steps_names_its_work(tmp_path):
    def behind(rank, work):
        return rf".*: rank {rank} on .* is behind, {work} at test_hangs.py:"

    scenarios = {
        "importing": (
            f"model.leaves_out=importing {QUICK}",
            "hang",
            behind(1, "importing the task"),
        ),
        # Rank 0 prepares: for 48 times hang_start.
        "preparing": (
            "model.leaves_out=preparing train.hang_after=12 train.hang_start=0.4",
            "hang",
            behind(0, "preparing the data"),
        ),
        "wrapping": (
            f"model.leaves_out=wrapping train.parallel=ddp {LATE}",
            "hang",
            behind(1, "wrapping the model"),
        ),
        "restoring": (
            "train.parallel=ddp model.leaves_out=restoring model.since=99 model.stop_at=3 " + QUICK,
            "hang",
            behind(1, "restoring"),
        ),
        "reporting": (
            f"model.leaves_out=reporting train.steps=2 {LATE}",
            "hang",
            behind(0, "making the report"),
        ),
    }
    require_ends(tmp_path, scenarios)
