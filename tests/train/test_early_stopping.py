"""Early stopping on the validation loss, as a unit and in whole runs."""

import time

import pytest

from hpcrun import exit_codes
from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.ranks.signals import STOP
from hpcrun.run.directory import create
from hpcrun.run.files import read_json, read_lines
from hpcrun.storage.store import CheckpointStore
from hpcrun.train.validation import EarlyStopping
from hpcrun.worker import run_rank
from tests.support.journal import read_events
from tests.support.on_ranks import forked
from tests.support.training.forks import fork_ranks

# The task's validation losses are 5, 3, 1, 4, 2, 6.
SETTINGS = [
    *(
        "task=tests.support.training.faulty_tasks:Judged",
        "job.gpus=1",
        "job.cpu=true",
        "train.batch_size=8",
    ),
    *("train.steps=40", "train.validate_every=2", "train.patience=2", "train.ema=0.5"),
    *("checkpoint.every=3", "checkpoint.keep=1", "checkpoint.keep_best=1", "train.log_every=4"),
]


def seen(losses, **options):
    early = EarlyStopping(**options)
    found = [(early.record(step, loss), early.due) for step, loss in enumerate(losses, start=1)]
    return early, [best for best, _ in found], [due for _, due in found]


def test_it_is_due_after_patience_validations_without_improvement():
    early, best, due = seen([5.0, 3.0, 4.0, 2.0, 2.5, 2.0], patience=2)
    assert best == [True, True, False, True, False, False]
    assert due == [False, False, False, False, False, True]
    assert (early.best, early.best_step, early.end(100)) == (2.0, 4, 6)


def test_a_nan_loss_is_never_better():
    early, best, due = seen([float("nan"), 5.0, float("inf"), float("nan")], patience=2)
    assert best == [False, True, False, False]
    assert due == [False, False, False, True]
    assert early.best == 5.0


def attempt(run, logs, restart=0):
    """Run an attempt of one rank that a person started; return its exit code."""

    def play(_):
        STOP.install()
        raise SystemExit(run_rank(run.path, STOP))

    folder = logs / str(restart)
    folder.mkdir(parents=True)
    (code,) = fork_ranks(1, play, folder)
    return code


@pytest.fixture
def make(tmp_path):
    def made(name, *overrides):
        config = resolve([override_layer([*SETTINGS, *overrides])])
        return create(tmp_path / name, to_yaml(config), {"created": time.time()})

    return made


@forked
def test_an_interrupted_run_also_finishes_early_with_its_best_step(make, tmp_path):
    calm, broken = make("calm"), make("broken", "model.stop_here=9")
    assert attempt(calm, tmp_path / "calm-logs") == exit_codes.DONE
    # The run stops between the validations of steps 8 and 10; the second exceeds the patience.
    assert attempt(broken, tmp_path / "broken-logs") == exit_codes.UNFINISHED
    assert read_json(broken.result)["state"] == "cancelled"
    assert attempt(broken, tmp_path / "broken-logs", 1) == exit_codes.DONE
    results = [read_json(run.result) for run in (calm, broken)]
    for run, result in zip((calm, broken), results, strict=True):
        assert (result["state"], result["steps"], result["validation_loss"]) == (
            "finished",
            10,
            2.0,
        )
        assert result["best"] == {"step": 6, "validation_loss": 1.0}
        assert (result["report_step"], result["report"]["asked"]) == (6, 6)
        assert result["stopped_early"].startswith("at step 10: 2 validations")
        store = CheckpointStore(run.checkpoints, "test-0")
        assert store.steps() == [10, 6]
        (end,) = [event for event in read_events(run) if event.tag == "finished"]
        assert (end.step, end.early) == (10, True)
        lines = [line for line in read_lines(run.metrics) if "validation_loss" in line]
        assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]
        # As the lines of training have them.
        assert all(line["time"] > 0 and line["restart"] == 0 for line in lines)
        losses = [line["step"] for line in read_lines(run.metrics) if "loss" in line]
        assert losses == [4, 8, 10]
    said = (tmp_path / "calm-logs" / "0" / "rank-0.log").read_text()
    assert "hpcrun: stopped early at step 10: 2 validations without a better loss; the best" in said

    # A run that crashed between its last checkpoint and its result has nothing left to train.
    calm.result.unlink()
    assert attempt(calm, tmp_path / "calm-logs", 1) == exit_codes.DONE
    again = read_json(calm.result)
    assert again == results[0] | {key: again[key] for key in ("time", "goodput")}
    assert store.steps() == [10, 6]

    # A damaged best checkpoint must not be used for the report.
    share = calm.checkpoints / "step-000000006" / "rank-00000.bin"
    share.write_bytes(bytes(share.stat().st_size))
    calm.result.unlink()
    assert attempt(calm, tmp_path / "calm-logs", 2) == exit_codes.DONE
    last = read_json(calm.result)
    assert (last["state"], last["report"]) == ("finished", {})
    assert last["report_error"].startswith("none: the best weights are not readable: ")


@forked
def test_patience_without_a_validation_set_is_refused(make, tmp_path):
    run = make("blind", "task=tests.support.training.faulty_tasks:Regression")
    assert attempt(run, tmp_path / "logs") == exit_codes.BAD_INPUT
    said = (tmp_path / "logs" / "0" / "rank-0.log").read_text()
    assert "hpcrun: train.patience: Regression has no validation set; add one" in said
