"""The section ``checkpoint`` of a config in the training loop: the checkpoints that it keeps."""

import errno
import os
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hpcrun import exit_codes
from hpcrun.checkpoint.interval import young
from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.signals import STOP
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.storage.disk import FileSystem
from hpcrun.storage.store import CheckpointStore
from hpcrun.train.saving import build_interval, failure_seconds, make_room
from hpcrun.worker import run_rank
from tests.checkpoint import faults
from tests.checkpoint.test_quarantine import flip
from tests.support.journal import read_events, record_event
from tests.support.training.forks import fork_ranks

COMMON = [
    *("task=tests.support.training.faulty_tasks:Graded", "job.gpus=1", "job.cpu=true"),
    *("train.steps=12", "train.batch_size=8", "train.validate_every=2", "optim.warmup_steps=2"),
]


def configured(*overrides):
    return resolve([override_layer([*COMMON, *overrides])])


def trained(folder: Path, *overrides: str) -> RunDirectory:
    """Run one rank, started by a person, with these overrides to its end."""
    run = create(folder / "run", to_yaml(configured(*overrides)), {"created": time.time()})
    logs = folder / "logs"
    code, trouble = started(run, logs)
    assert code == exit_codes.DONE, trouble
    return run


def started(run: RunDirectory, logs: Path) -> tuple[int, str]:
    """Return the exit code of one rank that a person started, and its exception."""
    logs.mkdir()

    def play(_: int) -> None:
        torch.set_num_threads(1)
        raise SystemExit(run_rank(run.path, STOP))

    (code,) = fork_ranks(1, play, logs)
    return code, (logs / "rank-0.log").read_text()


def kept(run: RunDirectory) -> list[int]:
    """Return the steps of the present checkpoints, after a check that all are valid."""
    store = CheckpointStore(run.checkpoints, "test-0")
    for step in store.steps():
        store.check(step)
    return store.steps()


def saved(run: RunDirectory) -> list[int | None]:
    """Return all steps that were saved at some time."""
    return [event.step for event in read_events(run) if event.tag == "saved"]


def test_every_nth_the_best_and_the_newest_are_kept(tmp_path):
    run = trained(
        tmp_path,
        *("checkpoint.every=2", "checkpoint.keep=1"),
        *("checkpoint.keep_every=4", "checkpoint.keep_best=1"),
    )
    assert saved(run) == [2, 4, 6, 8, 10, 12]
    # 6 has the lowest loss, 4, 8 and 12 are multiples of 4, 12 is the newest.
    assert kept(run) == [12, 8, 6, 4]
    store = CheckpointStore(run.checkpoints, "test-0")
    assert store.manifest(6).meta["validation_loss"] == 1.0


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        # Minutes shorter than any step: the first interval begins at the first step.
        (["checkpoint.minutes=0.0000001"], list(range(2, 13))),
        # Minutes longer than the run, in place of steps.
        (["checkpoint.minutes=600", "checkpoint.every=2"], [12]),
        # Young's formula gives at least half a minute.
        (["checkpoint.auto=true", "checkpoint.every=2"], [12]),
        (["checkpoint.every=0"], [12]),
    ],
)
def test_minutes_and_auto_replace_steps(tmp_path, overrides, steps):
    run = trained(tmp_path, *overrides, "checkpoint.keep=2", "train.validate_every=0")
    assert saved(run) == steps
    assert kept(run) == steps[-1:-3:-1]


def test_auto_follows_the_cost_of_saves_and_failures(tmp_path):
    config = configured("checkpoint.auto=true")
    run = create(tmp_path / "run", to_yaml(config), {"created": time.time()})
    now = time.time()
    for restart in range(3):
        attempt = Attempt("7", restart)
        record_event(run, "started", attempt=attempt, step=0)
        record_event(run, "ended", attempt=attempt, cause="crash", step=0)
    record_event(run, "started", attempt=Attempt("7", 3), step=0)
    failure = failure_seconds(read_events(run), now)
    assert failure == pytest.approx(86400 / 4, rel=0.01)

    clock = [0.0]
    costs = [None]
    interval = build_interval(run, config, Ranks(), lambda: costs[0], clock=lambda: clock[0])
    times = []
    for step in range(1, 4000):
        clock[0] += 1.0
        if interval.due(step):
            times.append(clock[0])
            costs[0] = (2.0, 10.0)
    # Before a measurement, the first save counts five seconds; then the measured two seconds count.
    first, second = young(None, failure), young((2.0, 10.0), failure)
    assert first > 1.5 * second
    assert times[0] == pytest.approx(first, abs=3)
    assert [b - a for a, b in pairwise(times)] == pytest.approx([second] * (len(times) - 1), abs=3)


def test_a_start_prunes_after_a_full_disk(tmp_path, capsys):
    run = create(tmp_path / "run", to_yaml(configured()), {"created": time.time()})
    store = CheckpointStore(run.checkpoints, "test-0")
    for step in range(1, 6):
        faults.save(store, step)
    make_room(store, configured("checkpoint.keep=2"), step=3)
    assert kept(run) == [5, 4, 3]
    make_room(store, configured("checkpoint.keep=1"), step=5)
    assert kept(run) == [5]
    (run.checkpoints / "step-000000005").rename(run.path / "moved")
    run.checkpoints.rmdir()
    run.checkpoints.write_text("no folder")
    make_room(store, configured(), step=5)
    assert "cannot be listed" in capsys.readouterr().err


def restarted_with(monkeypatch, name, replacement, run, logs):
    """Run as :func:`started`, with the file system's call ``name`` replaced."""
    monkeypatch.setattr(FileSystem, name, replacement)
    try:
        return started(run, logs)
    finally:
        monkeypatch.undo()


def test_a_start_after_read_errors_resumes_from_the_newest(tmp_path, capfd, monkeypatch):
    run = trained(tmp_path, "checkpoint.every=4", "checkpoint.keep=2")
    run.result.unlink()

    def refuse(self, descriptor, view, position):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    code, trouble = restarted_with(monkeypatch, "read_into", refuse, run, tmp_path / "second")
    assert code == exit_codes.FAILED
    assert "another --name" not in trouble
    last = read_events(run)[-1]
    assert (last.tag, last.cause) == ("ended", "crash")
    assert "cannot be read: Input/output error (EIO); the checkpoint is kept" in last.reason
    assert kept(run) == [12, 8]

    run.result.unlink()
    empty = restarted_with(monkeypatch, "names", lambda *_: [], run, tmp_path / "third")
    assert empty[0] == exit_codes.BAD_INPUT
    assert kept(run) == [12, 8]
    code, trouble = started(run, tmp_path / "fourth")
    assert code == exit_codes.DONE, trouble
    assert "resumed from step 12" in capfd.readouterr().out


def test_a_start_falls_back_from_damage_never_to_zero(tmp_path, capfd):
    run = trained(tmp_path, "checkpoint.every=4", "checkpoint.keep=2")
    assert kept(run) == [12, 8]
    run.result.unlink()
    flip(run.checkpoints / "step-000000012" / "rank-00000.bin")
    code, trouble = started(run, tmp_path / "second")
    assert code == exit_codes.DONE, trouble
    said = capfd.readouterr().out
    assert "step 12 skipped: " in said
    assert "step 12 is damaged and was renamed to damaged-step-000000012-" in said
    assert "resumed from step 8" in said
    assert kept(run) == [12, 8]
    assert len(list(run.checkpoints.glob("damaged-*"))) == 1
    assert read_events(run).committed == 12

    run.result.unlink()
    shutil.rmtree(run.checkpoints)
    before = [event.tag for event in read_events(run)].count("started")
    code, trouble = started(run, tmp_path / "third")
    assert code == exit_codes.BAD_INPUT, trouble
    assert "checkpoints: step 12 was saved, and no checkpoint is left" in capfd.readouterr().err
    assert [event.tag for event in read_events(run)].count("started") == before
