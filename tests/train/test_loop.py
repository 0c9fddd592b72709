"""The training loop with small substitutes for its parts."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpcrun.config import Config
from hpcrun.ranks.collective import Ranks, StopAgreement
from hpcrun.ranks.signals import StopReason
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_lines
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.health.slow_nodes import SlowNodeWatch
from hpcrun.train.metrics.log import MetricsLog, StepMeasurements
from hpcrun.train.metrics.sinks import JsonLines, Sinks
from hpcrun.train.metrics.stopwatch import Stopwatch
from hpcrun.train.metrics.timing import FlopCounter, Profile
from hpcrun.train.position import Position
from hpcrun.train.session import Loop
from hpcrun.train.step.amp_trainer import AMPTrainer
from hpcrun.train.validation import EarlyStopping


class Saving:
    """A saver that only reads the metrics file when it is called."""

    def __init__(self, run):
        self._run, self.found = run, {}

    def poll(self):
        pass

    def due(self, done):
        return done == 3

    def due_in_memory(self, done):
        return False

    def start(self, done):
        self.found[done] = [line["step"] for line in read_lines(self._run.metrics)]

    finish = start


def run_loop(run, saver, last, loss, validate=lambda: None, window=None):
    """Run five steps of the loop, or stop after step ``last``."""
    config = Config.model_validate({"train": {"steps": 5, "log_every": 1}})
    trainer = AMPTrainer(nn.Linear(2, 1), lambda m: torch.optim.SGD(m.parameters()), device="cpu")
    watch = Stopwatch(trainer.device)
    sinks, position = Sinks([JsonLines(run, pause=3600.0)]), Position()
    task = SimpleNamespace(unit="samples", units_per_sample=1, loader_processes=None)
    measured = StepMeasurements(watch, FlopCounter(None, None), loss, None)
    agreement = StopAgreement(None)
    loop = Loop(
        config=config,
        steps=range(5),
        batches=iter([MicroBatches([torch.ones(3, 2)])] * 5),
        take=lambda _, micro_batches: trainer.training_step(micro_batches, loss),
        agreement=agreement,
        reason_to_stop=lambda: StopReason.WARNING if position.step == last - 1 else StopReason.NONE,
        validate=validate,
        early=EarlyStopping(None),
        metrics=MetricsLog(
            *(config, task, trainer, measured, sinks),
            ranks=Ranks(),
            attempt={"restart": 0},
            slow=SlowNodeWatch(run, Attempt("1", 0), ["n0"], replace=False),
            agreement=agreement,
        ),
        saver=saver,
        nonfinite=SimpleNamespace(check=lambda _: None, finish=lambda: None),
        profile=Profile(
            *(run, window, 0), rank=0, device=trainer.device, watch=watch, position=position
        ),
        position=position,
    )
    loop.run()
    sinks.close()


def mean(model, batch):
    return model(batch).mean()


@pytest.mark.parametrize("last", [5, 4])
def test_metrics_are_written_before_every_save(tmp_path, last):
    run = RunDirectory(tmp_path)
    saver = Saving(run)
    run_loop(run, saver, last, mean)
    assert saver.found == {3: [1, 2, 3], last: list(range(1, last + 1))}


def test_garbage_is_collected_automatically_in_validations_only(tmp_path):
    run = RunDirectory(tmp_path)
    training, validating = [], []

    def loss(model, batch):
        training.append(gc.isenabled())
        return mean(model, batch)

    run_loop(run, Saving(run), 5, loss, lambda: validating.append(gc.isenabled()))
    assert (training, validating) == ([False] * 5, [True])


@pytest.mark.parametrize(("last", "steps"), [(5, "2-5"), (4, "2-4"), (2, "2")])
def test_a_stop_in_the_window_writes_the_profile_last(tmp_path, capsys, last, steps):
    run = RunDirectory(tmp_path)
    saver, written = Saving(run), []
    saver.finish = lambda done: written.append((done, run.profile.exists()))
    run_loop(run, saver, last, mean, window="2-9")
    assert written == [(last, False)]
    assert (run.profile / "trace-rank-00000.json.gz").stat().st_size
    assert f"profile of step{'s' * ('-' in steps)} {steps}, by CPU time" in capsys.readouterr().out
