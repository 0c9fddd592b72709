"""Results of whole runs of two ranks: reports, metrics, profiles and uploads."""

import atexit
import gzip
import json
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from hpcrun import get_rank
from hpcrun.checkpoint.export import best_readable, newest_readable
from hpcrun.checkpoint.stored_model import StoredModel
from hpcrun.run.files import read_json, read_lines
from hpcrun.storage.store import CheckpointStore
from tests.support.on_ranks import forked
from tests.support.training.faulty_tasks import Judged, Regression
from tests.support.training.runs import DONE, STOPPED_ONCE, play_run


@forked
def test_the_report_is_of_the_best_weights(tmp_path):
    played = play_run(
        tmp_path,
        Judged,
        *("train.steps=40", "train.validate_every=2", "train.patience=2"),
        *("train.ema=0.5", "checkpoint.keep=1", "checkpoint.keep_best=1"),
    )
    assert played.codes == DONE, played.said()
    result = read_json(played.run.result)
    assert (result["steps"], result["validation_loss"]) == (10, 2.0)
    assert (result["best"], result["report_step"]) == ({"step": 6, "validation_loss": 1.0}, 6)
    store = CheckpointStore(played.run.checkpoints, "test-0")
    best = StoredModel(store, best_readable(store), averaged=True).state()
    asked, weight = best["asked"].item(), best["body.weight"].sum().item()
    assert result["report"] == {"weight": weight, "asked": asked, "loss": 1.0}
    assert asked == 6
    assert "hpcrun: the report is for step 6, the best; 10 is the last\n" in played.said()
    assert StoredModel(store, newest_readable(store)).state()["asked"] == 10


class ReportRaises(Regression):
    def report(self, model, validation_loss):
        raise KeyError("accuracy")


class ReportHoldsTensor(Regression):
    def report(self, model, validation_loss):
        return {"accuracy": torch.tensor(0.5)}


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (ReportRaises, "ReportRaises.report() raised KeyError: 'accuracy'"),
        (ReportHoldsTensor, "ReportHoldsTensor.report() raised TypeError: "),
    ],
)
@forked
def test_a_failing_report_does_not_fail_a_finished_run(tmp_path, task, reason):
    played = play_run(tmp_path, task, "train.steps=2")
    assert played.codes == DONE, played.said()
    result = read_json(played.run.result)
    assert (result["state"], result["report"]) == ("finished", {})
    assert result["report_error"].startswith(reason)
    assert reason in played.said()


class ModelNeedsPreparedData(Regression):
    def prepare(self):
        self.mark().write_text("8")

    def build_model(self):
        width = int(self.mark().read_text())
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))

    def mark(self):
        return Path(self.config.data.own["mark"])


@forked
def test_a_model_may_depend_on_data_that_rank_0_prepares(tmp_path):
    mark = tmp_path / "mark"
    played = play_run(tmp_path, ModelNeedsPreparedData, f"data.mark={mark}", "train.steps=2")
    assert played.codes == DONE, played.said()
    assert mark.read_text() == "8"


@forked
def test_a_run_is_profiled_and_measured_although_it_is_stopped(tmp_path):
    played = play_run(
        tmp_path,
        Regression,
        *("model.stop_at=6", "train.profile=2-3", "watch.tensorboard=true"),
        "watch.peak_flops=1e9",
    )
    assert played.codes == STOPPED_ONCE, played.said()
    run, lines = played.run, read_lines(played.run.metrics)

    # Each rank is profiled in the window, with its costly operations.
    for rank in (0, 1):
        with gzip.open(run.profile / f"trace-rank-{rank:05d}.json.gz") as stream:
            names = [event.get("name") for event in json.load(stream)["traceEvents"]]
        # Two steps of two linear layers.
        assert names.count("aten::addmm") == 4
        table = (run.profile / f"operations-rank-{rank:05d}.txt").read_text()
        assert "aten::addmm" in table
        assert table.startswith("a step of ")
    assert played.said().count("profile of steps 2-3") == 1

    # TensorBoard has every logged step once.
    accumulator = EventAccumulator(str(run.tensorboard))
    accumulator.Reload()
    written = {event.step: event.value for event in accumulator.Scalars("loss")}
    assert written == pytest.approx({line["step"]: line["loss"] for line in lines})
    assert [event.step for event in accumulator.Scalars("mfu")] == sorted(written)

    # A line of metrics has the times and the slowest rank.
    line = lines[-1]
    # 8 samples x (4 x 8 + 8 weights) x 2 operations x 3 passes, on two devices of 1 GFLOP/s.
    assert line["mfu"] == pytest.approx(8 * 40 * 6 / line["step_time"] / 2e9, rel=0.01)
    assert 0 < line["data_wait"] < line["step_time"]
    assert 0 < line["stop_wait"] < line["step_time"]
    assert line["slowest_own_time"] >= line["fastest_own_time"] > 0
    assert line["slowest_rank"] in (0, 1)
    assert line["memory_gb"] > 0.01

    # The first line excludes the time before the first step.
    began = played.events("started")[0].time
    assert lines[0]["step_time"] * lines[0]["step"] <= lines[0]["time"] - began + 0.01


class UploadsSlowly(Regression):
    """A stand-in for W&B with a slow connection; rank 1 records when it leaves."""

    def build_model(self):
        if get_rank() == 0:
            upload = types.SimpleNamespace(step=0, log=lambda *_, **__: None, finish=self.finish)
            sys.modules["wandb"] = types.SimpleNamespace(init=lambda **_: upload)
        else:
            atexit.register(self.note, "left")
        return super().build_model()

    def finish(self):
        time.sleep(2.0)
        self.note("uploaded")

    def note(self, what):
        with Path(self.config.model.own["notes"]).open("a") as notes:
            notes.write(f"{what}\n")


@forked
def test_no_rank_leaves_before_the_metrics_are_sent(tmp_path):
    notes = tmp_path / "notes"
    overrides = ("model.stop_at=5", "watch.wandb=a", f"model.notes={notes}")
    played = play_run(tmp_path, UploadsSlowly, *overrides)
    # srun would kill it soon after rank 0's end: once at the stop, once at the end.
    assert played.codes == STOPPED_ONCE, played.said()
    assert notes.read_text().split() == ["uploaded", "left"] * 2
