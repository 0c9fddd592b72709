"""Logged metrics: times, means, stragglers, FLOP/s and sinks."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from hpcrun.config import Config
from hpcrun.devices import accelerator, vendor
from hpcrun.errors import UserError
from hpcrun.ports.sinks import TrainingStart
from hpcrun.ranks.collective import Ranks, StopAgreement
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_lines, write_json
from hpcrun.run.record import wandb_id
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.health.slow_nodes import SlowNodeWatch
from hpcrun.train.metrics.log import MetricsLog, StepMeasurements, utilization
from hpcrun.train.metrics.sinks import JsonLines, Sinks, TensorBoard, build_sinks
from hpcrun.train.metrics.stopwatch import StepTimeMeans, Stopwatch
from hpcrun.train.metrics.timing import FlopCounter, peak_here, peak_of, twin
from hpcrun.train.step.amp_trainer import AMPTrainer
from hpcrun.train.step.gate import StepGate

ALONE = SlowNodeWatch(RunDirectory(Path()), Attempt("1", 0), ["n0"], replace=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    write_json(run.record, {"created": 5.0})
    return run


def test_the_stopwatch_gives_means_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([-60.0, 0.0, 1.0, 3.0, 4.0, 7.0, 10.0, 14.0, 15.0, 18.0, 24.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    loss = watch.timed(lambda *_: torch.zeros(()))
    watch.waited(0.5)
    loss(nn.Identity(), None)  # From 1 to 3, in the first step of the process.
    watch.waited(0.25)
    loss(nn.Identity(), None)  # From 4 to 7.
    with watch.paused():  # From 10 to 14.
        pass
    watch.waited(0.75)
    loss(nn.Identity(), None)  # From 15 to 18, in the step after the pause.
    lap = watch.lap(2)
    assert (lap.step, lap.data, lap.own) == (10.0, 0.75, 3.25)


class Event:
    """A CUDA event of a device with a clock that forward passes advance."""

    now = 0.0

    def __init__(self, device: torch.device, *, timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Event.now

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) * 1e3


@pytest.fixture(autouse=True)
def clock_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset the loss: after a NaN batch it would stay NaN."""
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(accelerator, "event", Event)
    monkeypatch.setattr(accelerator, "record", lambda event, _: event.record())


class Training:
    """Train a line with one weight, and return the logged lines."""

    def __init__(self, device: str = "cpu", batch_size: int = 1, **train: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        config = Config.model_validate({"train": {"batch_size": batch_size, **train}})
        task = SimpleNamespace(unit="tokens", units_per_sample=6, loader_processes=None)
        self.watch = Stopwatch(torch.device(device))
        self.loss = self.watch.timed(self.passing)
        line = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(line.parameters(), 0.0, momentum=0.9, fused=True)
        self.trainer = AMPTrainer(line, optimizer, device="cpu")
        measured = StepMeasurements(self.watch, FlopCounter(None, 10.0), self.loss, 1e6)
        sinks = SimpleNamespace(write=self.lines.append)
        self.log = MetricsLog(
            config,
            task,
            self.trainer,
            measured,
            sinks,
            ranks=Ranks(),
            attempt={"restart": 0},
            slow=ALONE,
            agreement=StopAgreement(None),
        )
        self.done = 0

    def passing(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        Event.now += batch.mean().item()
        return model(batch * 0).mean() + batch.mean()

    def step(self, *values: float) -> None:
        batches = MicroBatches(torch.tensor([[float(value)]]) for value in values)
        self.done += 1
        self.log.step(self.done, self.trainer.training_step(batches, self.loss))


@pytest.mark.parametrize(
    ("every", "logged"), [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [2, 4, 6, 7]), (5, [5, 7])]
)
def test_a_gpu_measures_the_forward_passes_of_each_logged_step(
    monkeypatch: pytest.MonkeyPatch, every: int, logged: list[int]
) -> None:
    training = Training("cuda", steps=7, log_every=every)
    lap, own = training.watch.lap, []

    def noted(steps: int) -> StepTimeMeans:
        own.append(lap(steps).own)
        return StepTimeMeans(1.0, 0.0, own[-1])

    monkeypatch.setattr(training.watch, "lap", noted)
    for step in range(1, 8):
        training.step(step, step)
    assert [line["step"] for line in training.lines] == logged
    assert own == pytest.approx([2.0 * step for step in logged])


def test_slow_data_on_a_gpu_gets_one_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accelerator, "is_accelerator", lambda _: True)
    monkeypatch.setattr(accelerator, "peak_memory", lambda _: 1e9)
    told = []
    for waiting in (0.2, 0.8):
        training = Training(steps=9, log_every=1, validate_every=0)
        monkeypatch.setattr(
            training.watch, "lap", lambda _, waiting=waiting: StepTimeMeans(1.0, waiting, 0.9)
        )
        for _ in range(4):
            training.step(1.0)
            told.append(capsys.readouterr().out)
    # The first line of an attempt has the start of the loader processes.
    assert [bool(text) for text in told] == [False] * 5 + [True] + [False] * 2
    assert told[5].startswith(
        "hpcrun: data.workers: 80% of a step is the wait for a batch, with 0 "
    )


def test_rates_count_all_samples_of_a_step() -> None:
    training = Training(batch_size=4, steps=4, log_every=3)
    for _ in range(4):
        training.step(1.0)
    for line in training.lines:
        seconds = line["step_time"]
        assert line["tokens_per_second"] * seconds == pytest.approx(6 * 4, rel=1e-2)
        assert line["mfu"] * seconds == pytest.approx(10 * 4 / 1e6, rel=1e-2)


@pytest.mark.parametrize("late", [False, True])
def test_a_skipped_step_does_not_count_in_the_loss(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    if late:
        monkeypatch.setattr(StepGate, "late_on", frozenset({"cpu"}))
    training = Training(steps=99, log_every=3)
    for value in (1.0, math.nan, 4.0, 2.0, 2.0, math.nan, math.nan, math.nan, math.nan):
        training.step(value)
        # A reader of each decision in order gets the same values.
        assert training.trainer.gate.pending == (late and training.done > 1)
    losses = [line["loss"] for line in training.lines]
    assert losses == [2.5, 2.0, pytest.approx(math.nan, nan_ok=True)]


def test_a_line_is_the_mean_over_its_steps() -> None:
    # The fifth step is skipped.
    shape = {"batch_size": 4, "steps": 6, "log_every": 5}
    losses = (1.0, 2.0, 3.0, 4.0, math.nan, 5.0)
    calm, first, second, third = (Training(**shape) for _ in range(4))
    for loss in losses:
        calm.step(loss)
    for stopped, again, at in ((first, second, 2), (second, third, 4)):
        for loss in losses[stopped.done : at]:
            stopped.step(loss)
        assert not stopped.lines
        again.done = at
        again.log.restore(stopped.log.saved())
    for loss in losses[4:]:
        third.step(loss)
    assert [line["loss"] for line in calm.lines] == pytest.approx([2.5, 5.0])
    assert [line["loss"] for line in third.lines] == pytest.approx([2.5, 5.0])
    assert third.log.saved() == []


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GB300", 2500e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("AMD Instinct MI250X / MI250", 191.5e12),
        ("AMD Instinct MI210", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peaks_match_the_whole_device_name(name: str, peak: float | None) -> None:
    assert peak_of(name, "bf16") == peak


def test_an_unknown_device_has_a_peak_by_config_only() -> None:
    assert peak_here(torch.device("cpu"), "fp32", None) is None
    assert peak_here(torch.device("cpu"), "fp32", 2e9) == 2e9


def test_a_linear_layer_takes_six_operations_a_weight_and_sample() -> None:
    layer = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Dropout(0.5))
    counter = FlopCounter(twin(layer), given=None)
    loss = counter.counting(lambda model, batch: model(batch["x"]).mean())
    before = torch.get_rng_state()
    loss(nn.Identity(), {"x": torch.ones(4, 16)})
    assert counter.per_sample == 6 * 16 * 32
    assert torch.equal(torch.get_rng_state(), before)
    assert FlopCounter(twin(layer), given=7.0).per_sample == 7.0


def test_a_data_dependent_model_trains_without_a_flop_count() -> None:
    layer = nn.Linear(2, 1)
    counter = FlopCounter(twin(layer), given=None)

    def looks(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean() * (1 if batch.sum().item() > 0 else 2)

    assert counter.counting(looks)(layer, torch.ones(3, 2)).isfinite()
    assert counter.per_sample is None


def test_tensorboard_shows_each_step_once_after_a_crash(run: RunDirectory) -> None:
    first = TensorBoard(TrainingStart(run.path, {}, 0))
    for step in range(1, 7):
        first.write({"step": step, "time": 1.0, "loss": 1.0, "slowest_host": "n0"})
    first.close()
    second = TensorBoard(TrainingStart(run.path, {}, 4))
    for step in range(5, 9):
        second.write({"step": step, "time": 1.0, "loss": 2.0})
    second.close()
    accumulator = EventAccumulator(str(run.tensorboard)).Reload()
    found = [(event.step, event.value) for event in accumulator.Scalars("loss")]
    assert found == [(step, 1.0 if step < 5 else 2.0) for step in range(1, 9)]
    assert accumulator.Tags()["scalars"] == ["loss"]


@pytest.mark.parametrize(
    ("watch", "module", "line"),
    [
        ({"tensorboard": True}, "torch.utils.tensorboard", "watch.tensorboard: the package"),
        ({"wandb": "a"}, "wandb", "watch.wandb: the package wandb is not installed; `pip install"),
    ],
)
def test_a_package_that_is_missing_is_named_at_the_start(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, watch: dict, module: str, line: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError) as caught:
        build_sinks(run, Config.model_validate({"watch": watch}), start=0)
    assert str(caught.value).startswith(line)


def test_a_failing_sink_is_reported_once_and_the_rest_continues(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        written = 0

        def write(self, line: object) -> None:
            self.written += 1
            raise OSError("no space")

        def flush(self) -> None:
            """Do nothing: this sink has no buffer."""

        def close(self) -> None:
            raise OSError("no space for the rest either")

    full = Full()
    sinks = Sinks([full, JsonLines(run)])
    sinks.write({"step": 1})
    sinks.write({"step": 2})
    sinks.close()
    assert read_lines(run.metrics) == [{"step": 1}, {"step": 2}]
    assert full.written == 2
    assert (
        capsys.readouterr().err == "hpcrun: cannot write Full: no space; the training continues\n"
    )


def test_all_attempts_of_a_run_are_one_run_of_wandb(run: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path / "other" / "run")
    other.path.mkdir(parents=True)
    write_json(other.record, {"created": 6.0})
    assert wandb_id(run) == wandb_id(RunDirectory(run.path))
    assert wandb_id(run) != wandb_id(other)


@pytest.mark.slow
def test_wandb_takes_the_lines_offline_and_skips_repeated_steps(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sinks = build_sinks(run, Config.model_validate({"watch": {"wandb": "trial"}}), start=0)
    for step in (10, 20, 10, 30):
        sinks.write({"step": step, "time": 1.0, "loss": 1.0 / step})
    sinks.close()
    (offline,) = (run.path / "wandb").glob("offline-run-*")
    (data,) = offline.glob("run-*.wandb")
    assert wandb_id(run) in data.name
    assert data.stat().st_size > 0


def test_a_line_has_the_mean_utilization_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(log_every=1, steps=2)
    training.step(1.0)
    assert "gpu_utilization" not in training.lines[0]
    use = SimpleNamespace(read=lambda: 61.26, close=lambda: None)
    monkeypatch.setattr(vendor, "gpu_utilization", lambda _: use)
    training = Training(log_every=1, steps=2)
    training.step(1.0)
    assert training.lines[0]["gpu_utilization"] == 61.3
    assert "lowest_gpu_rank" not in training.lines[0]


def test_the_rank_with_an_idle_gpu_is_named() -> None:
    nan = math.nan
    assert utilization([80.0, nan, 0.0, 90.04]) == {
        "gpu_utilization": 56.7,
        "lowest_gpu_utilization": 0.0,
        "lowest_gpu_rank": 2,
    }
    assert utilization([nan, nan]) == {}
