"""Tasks with errors of every kind, for the runs of ``runs.py``."""

import atexit
import ctypes
import os
import random
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

from hpcrun import Task, get_rank
from hpcrun.errors import UserError


class Noisy(Dataset):
    """Samples with noise from every generator that a data set may use."""

    def __init__(self, size=24):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        noise = torch.rand(4) + random.random() + np.random.rand()
        return torch.full((4,), index / self.size) + noise


class Regression(Task):
    """A task that learns a sum of noisy numbers, with a warmed-up loss.

    ``stop_at`` sends rank 1 a SIGTERM at that call of the loss.
    """

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))

    def train_dataset(self):
        return Noisy()

    def loss(self, model, batch):
        if model.training:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == self.config.model.own.get("stop_at") and get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            self.mishap()
        warm = min(1.0, (self.step + 1) / 20)
        return warm * (model(batch).squeeze(-1) - batch.sum(-1)).square().mean()

    def mishap(self):
        """Accept a hook of subclasses."""


class Exact(Regression):
    """The same task without randomness, and with blocks."""

    class Known(Noisy):
        def __getitem__(self, index):
            return torch.randn(4, generator=torch.Generator().manual_seed(index))

    def build_model(self):
        blocks = [nn.Linear(8, 8) for _ in range(2)]
        return nn.Sequential(nn.Linear(4, 8), nn.Sequential(*blocks), nn.Tanh(), nn.Linear(8, 1))

    def train_dataset(self):
        return self.Known()


class Wide(Regression):
    """The same task with a block that fp8 takes."""

    def build_model(self):
        layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        return Chain(nn.Linear(4, 16), layers, nn.Dropout(0.2), nn.Linear(16, 1))


class Chain(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = part(x) if not isinstance(part, nn.ModuleList) else part[1](part[0](x).tanh())
        return x


class Validated(Regression):
    def validation_dataset(self):
        return Noisy(3)


class Short(Noisy):
    """The same task with samples of different lengths, which need a collate function."""

    def __getitem__(self, index):
        return super().__getitem__(index)[: 1 + index % 4]


class Padded(Regression):
    def collate(self, samples):
        return torch.stack([nn.functional.pad(one, (0, 4 - len(one))) for one in samples])


class Ragged(Padded):
    """A task with a collate function, and an optimizer for a frozen and a slow layer."""

    def build_model(self):
        model = super().build_model()
        model[0].bias.requires_grad = False
        return model

    def train_dataset(self):
        return Short()

    def validation_dataset(self):
        return Short(3)

    def build_optimizer(self, model):
        slow = {"params": model[0].parameters(), "lr": 0.001, "weight_decay": 0.0}
        rest = {"params": [*model[1].parameters(), *model[3].parameters()]}
        return torch.optim.AdamW([rest, slow], lr=0.01, weight_decay=0.1)


class PrepareRefuses(Regression):
    def prepare(self):
        raise UserError("data.path: there is nothing at /nowhere; download it first")


class PrepareRaises(Regression):
    def prepare(self):
        raise OSError("the download broke off")


class ModelNeedsPreparedData(Regression):
    def prepare(self):
        self.mark().write_text("8")

    def build_model(self):
        width = int(self.mark().read_text())
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))

    def mark(self):
        from pathlib import Path

        return Path(self.config.data.own["mark"])


class DatasetMissingOnRank1(Regression):
    def train_dataset(self):
        if get_rank() == 1:
            raise UserError("data.path: there is nothing at /scratch")
        return super().train_dataset()


class ModelRaisesOnRank1(Regression):
    def build_model(self):
        if get_rank() == 1:
            raise ValueError("no room for this model")
        return super().build_model()


class NothingToValidate(Regression):
    def validation_dataset(self):
        return Noisy(0)


class ReportRaises(Regression):
    def report(self, model, validation_loss):
        raise KeyError("accuracy")


class KilledInReport(Validated):
    def report(self, model, validation_loss):
        os.kill(os.getpid(), signal.SIGKILL)


class ReportHoldsTensor(Regression):
    def report(self, model, validation_loss):
        return {"accuracy": torch.tensor(0.5)}


class ExitsWithZero(Regression):
    def mishap(self):
        if self.calls == 3:
            sys.exit(0)


class RaisesOnRank1(Regression):
    def mishap(self):
        if self.calls == 3 and get_rank() == 1:
            raise ValueError("a defect in the loss")


class RefusedKernel(Validated):
    """A model that calls, at ``model.at``, an operation without a deterministic kernel on any device."""

    def prepare(self):
        self.put("prepare")

    def mishap(self):
        if self.calls == 3:
            self.put(f"rank-{get_rank()}")

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if not model.training:
            self.put("validation")
        elif self.calls == 3:
            loss.register_hook(lambda _: self.put("backward"))
        return loss

    def put(self, at):
        if at == self.config.model.own["at"]:
            torch.zeros(2).put_(torch.tensor([0, 1]), torch.ones(2))


class HalfUsed(Regression):
    """A model with an unused layer."""

    def build_model(self):
        class Half(nn.Module):
            def __init__(self, body):
                super().__init__()
                self.body, self.spare = body, nn.Linear(3, 3)

            def forward(self, x):
                return self.body(x)

        return Half(super().build_model())


class GivesTwo(Regression):
    def loss(self, model, batch):
        return super().loss(model, batch), {"seen": len(batch)}


class ReportsItsWeights(Validated):
    """A task with a report that calls the whole model on rank 0 only, and with an optimizer."""

    build_optimizer = Ragged.build_optimizer

    def report(self, model, validation_loss):
        with torch.no_grad():
            return {
                "module": type(model).__name__,
                "weights": sum(parameter.numel() for parameter in model.parameters()),
                "output": model.eval()(torch.ones(2, 4)).shape[0],
                "step": self.step,
            }


class FailsWhileLoadersRead(Regression):
    def mishap(self):
        if self.calls == 3:
            raise ValueError("a defect in the loss")


class FailsWhileALoaderHangs(FailsWhileLoadersRead):
    class Hanging(Noisy):
        def __getitem__(self, index):
            worker = get_worker_info()
            self.read = getattr(self, "read", 0) + 1
            # The loss fails at the second step; a step has four samples, and this is the third, read ahead.
            if worker is not None and self.read > 8:
                time.sleep(600)
            return super().__getitem__(index)

    def train_dataset(self):
        return self.Hanging()


class FewSamples(Regression):
    def train_dataset(self):
        return Noisy(3)


class NotFiniteOnRank1(Regression):
    """A loss that is NaN on rank 1, at the calls from ``bad_from`` to ``bad_to``."""

    def loss(self, model, batch):
        value = super().loss(model, batch)
        wanted = self.config.model.own
        bad = model.training and wanted["bad_from"] <= self.calls <= wanted["bad_to"]
        return value * float("nan") if bad and get_rank() == 1 else value


class WeighsNoNumberOnRank1(Regression):
    """A task that weights the batch of the third step by 0 / 0."""

    def weight(self, batch):
        return float("nan") if self.step == 2 and get_rank() == 1 else float(len(batch))


class StreamOfSamples(Regression):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Noisy())

    def train_dataset(self):
        return self.Stream()


class OneOrder(torch.utils.data.IterableDataset):
    """A stream of noisy samples, the same on every rank, 13 per pass."""

    shards_itself = False

    def __init__(self):
        self.samples, self.next = Noisy(13), 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

    def __iter__(self):
        while self.next < len(self.samples):
            self.next += 1
            yield self.samples[self.next - 1]
        self.next = 0


class OwnSamples(OneOrder):
    """The same stream, with a different length on each rank."""

    shards_itself = True

    def __init__(self):
        super().__init__()
        self.samples = Noisy(9 + 2 * get_rank())


class Streaming(Padded):
    def train_dataset(self):
        stream = OneOrder()
        stream.samples = Short(13)
        return stream


class StreamingItsOwn(Regression):
    def train_dataset(self):
        return OwnSamples()


class Graded(Regression):
    """Validation losses of 5, 3, 1, 4, 2, ..., independent of training."""

    GRADES = (5.0, 3.0, 1.0, 4.0, 2.0, 6.0)

    def validation_dataset(self):
        return Noisy(1)

    def loss(self, model, batch):
        if model.training:
            return super().loss(model, batch)
        self.graded = getattr(self, "graded", 0) + 1
        return torch.tensor(self.GRADES[self.graded - 1])


class Judged(Regression):
    """Validation losses of 5, 3, 1, 4, 2, 6 after every second step, independent of training.

    ``stop_here`` sends this rank a SIGTERM at that call of the loss in training.
    """

    class Counting(nn.Module):
        """Count the calls in training."""

        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 1)
            self.register_buffer("asked", torch.tensor(0))

        def forward(self, inputs):
            self.asked += self.training
            return self.body(inputs)

    def build_model(self):
        return self.Counting()

    def validation_dataset(self):
        return Noisy(1)

    def loss(self, model, batch):
        if model.training:
            return super().loss(model, batch)
        return torch.tensor(Graded.GRADES[self.step // 2 - 1])

    def mishap(self):
        if self.calls == self.config.model.own.get("stop_here"):
            os.kill(os.getpid(), signal.SIGTERM)

    def report(self, model, validation_loss):
        return {
            "weight": model.body.weight.sum().item(),
            "asked": int(model.asked),
            "loss": validation_loss,
        }


class HangsOnRank1(Regression):
    """A task that hangs at the fourth call: asleep, or in C code that holds the interpreter's lock."""

    def mishap(self):
        if self.calls == 4 and get_rank() == 1:
            if self.config.model.own.get("holds_lock"):
                # Long enough for the watchdog to see that the first step is over.
                time.sleep(1.0)
                ctypes.PyDLL(None).sleep(600)
            time.sleep(600)


class RecompilesOnRank1(Regression):
    """A task that compiles something at the fourth call for longer than a step may take."""

    def mishap(self):
        def slowly(graph, _):
            # The first call only loads the compiler.
            time.sleep(8 if self.calls == 4 else 0)
            return graph.forward

        if self.calls in (1, 4) and get_rank() == 1:
            torch.compile(torch.sin, backend=slowly)(torch.ones(self.calls))


class FailsWhileAPeerIsBlind(Regression):
    """A task that fails on rank 1, while rank 0 waits as for a GPU: without noticing that rank 1 has gone."""

    def mishap(self):
        if self.calls == 4:
            if get_rank() == 1:
                raise ValueError("a failure of rank 1")
            time.sleep(600)


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
        with (Path(self.config.model.own["folder"]) / "uploads-order").open("a") as notes:
            notes.write(f"{what}\n")


class RunsOutOfMemory(Regression):
    def mishap(self):
        if self.calls == 3 and get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
