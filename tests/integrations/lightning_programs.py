"""Programs of Lightning users: one line in them knows hpcrun."""

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.callbacks.lr_finder import LearningRateFinder
from lightning.pytorch.plugins.environments import SLURMEnvironment as SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

from hpcrun.integrations.lightning import ExactResume
from hpcrun.train.own_loop.session import ENDED


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points with a label; each sample has new noise from the global generators."""

    def __init__(self, size: int) -> None:
        self.points = torch.randn(size, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = self.points[index]
        return point + 0.1 * torch.randn(6), (point.sum() > 0).long()


QUIET: dict[str, Any] = {
    **{"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
    **{"enable_progress_bar": False, "enable_model_summary": False},
}


def loader(*, workers: int = 0, size: int = 94, **options: Any) -> DataLoader[Any]:
    """Return a shuffled loader of uneven batches: 12 batches of 4 on each of two ranks, the last has 3."""
    return DataLoader(Points(size), 4, shuffle=True, num_workers=workers, **options)


def validation(workers: int = 0) -> DataLoader[Any]:
    """Return a loader with persistent workers, which draw random values."""
    return DataLoader(Points(10), 4, num_workers=workers, persistent_workers=workers > 0)


class Classifier(LightningModule):
    """A model with dropout, buffers, a scheduler that reads a mean over the epoch, and a torchmetric."""

    def __init__(self) -> None:
        super().__init__()
        # DDP expects gradients in another order than they are ready.
        self.last = nn.Linear(16, 2)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.seen = MeanMetric()
        self.register_buffer("epochs", torch.zeros(2))

    def on_train_start(self) -> None:
        self.epochs[0] += 1  # a resume must not count again

    def on_train_epoch_start(self) -> None:
        self.losses: list[float] = []
        self.epochs[1] += 1

    def training_step(self, batch: Any, index: int) -> Tensor:
        points, labels = batch
        loss = F.cross_entropy(self.last(self.net(points)), labels)
        self.losses.append(loss.item())
        self.seen.update(loss.detach())
        self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.epochs[1] *= 1.01

    def validation_step(self, batch: Any, index: int) -> None:
        points, labels = batch
        self.log("loss", F.cross_entropy(self.last(self.net(points)), labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.7, patience=0, threshold=0.2
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "mean_epoch", "interval": "epoch"},
        }


class Gan(LightningModule):
    """Two networks with their optimizers and schedulers, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, index: int) -> None:
        points, _ = batch
        first, second = self.optimizers()
        fake = self.generator(torch.randn(len(points), 3))
        # The gradients of two batches are summed.
        score = self.judge(points).mean() - self.judge(fake.detach()).mean()
        self.manual_backward(score.square() - score)
        if index % 2:
            second.step()
            second.zero_grad()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(-self.judge(fake).mean())
        first.step()
        self.untoggle_optimizer(first)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.generator.parameters(), lr=0.02),
            torch.optim.RMSprop(self.judge.parameters(), lr=0.02),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 3, 0.8) for one in optimizers]


class Sharded(Classifier):
    """The classifier without buffers that differ between ranks, sharded by FSDP2."""

    def configure_model(self) -> None:
        if not any(isinstance(part, FSDPModule) for part in self.modules()):
            for part in (self.net, self.last):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


def with_powersgd() -> DDPStrategy:
    """Return DDP with PowerSGD, which Lightning itself registers on GPUs only."""
    strategy = DDPStrategy()
    usual = strategy.setup

    def setup(trainer: Trainer) -> None:
        usual(trainer)
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        strategy.model.register_comm_hook(state, powerSGD_hook)

    strategy.setup = setup
    return strategy


class StopAfter(Callback):
    """Sends a signal to the last rank at the end of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        last = trainer.global_rank == trainer.world_size - 1
        if last and trainer.fit_loop.total_batch_idx + 1 == self.batch:
            os.kill(os.getpid(), signal.SIGUSR2)


def train(folder: Path, kind: str, *, stop: int = 0, epochs: int = 2, **options: Any) -> Trainer:
    """Run a user's program as from its first line, and return its Trainer; raises SystemExit at a stop."""
    ENDED.clear()
    seed_everything(5, verbose=False)
    several = int(os.environ.get("WORLD_SIZE", "1"))
    model, callbacks, workers = Classifier(), [ExactResume(folder, every=3)], 0
    settings: dict[str, Any] = {"strategy": "ddp" if several > 1 else "auto"}
    if kind == "workers":
        workers, settings["val_check_interval"] = 1, 2
    elif kind == "accumulation":
        settings["accumulate_grad_batches"] = 2
        settings["strategy"] = with_powersgd() if several > 1 else "auto"
        callbacks.append(EMAWeightAveraging(decay=0.9))
    elif kind == "gan":
        model, settings["strategy"] = Gan(), "ddp_find_unused_parameters_true"
    elif kind == "sharded":
        model = Sharded()
        settings["strategy"] = ModelParallelStrategy(several, 1)
    settings |= {"devices": several, "max_epochs": epochs} | options
    trainer = Trainer(callbacks=[StopAfter(stop), *callbacks], **QUIET, **settings)
    trainer.fit(model, loader(workers=workers), validation(workers))
    return trainer


def state(trainer: Trainer) -> dict[str, Any]:
    """Return weights, learning rates and logged values."""
    weights = {
        name: (value.to_local() if isinstance(value, DTensor) else value).clone()
        for name, value in trainer.lightning_module.state_dict().items()
    }
    rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": weights, "rates": rates, "logged": logged, "steps": trainer.global_step}


def fit(
    folder: Path, data: Any = None, callbacks: Any = (), finds_rate: bool = False, **settings: Any
) -> Trainer:
    """Train on one rank without output; return the Trainer. ``finds_rate``: with a search for a rate."""
    callbacks = [*callbacks, LearningRateFinder()] if finds_rate else callbacks
    trainer = Trainer(
        max_epochs=1, callbacks=[ExactResume(folder), *callbacks], **QUIET, **settings
    )
    trainer.fit(Classifier(), data or loader(size=8), validation())
    return trainer


class Batches(Callback):
    """Calls a function with the number of the batch after each batch."""

    def __init__(self, after: Callable[[int], object]) -> None:
        self._after = after

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._after(trainer.fit_loop.total_batch_idx + 1)


def with_lightning(after: Callable[[int], object]) -> tuple[str, int]:
    """Train on two nodes with one rank each; return a hash of the weights, and the number of steps."""
    seed_everything(5)
    model = Classifier()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy="ddp",
        max_epochs=2,
        val_check_interval=5,
        callbacks=[Batches(after), ExactResume(every=3)],
        enable_progress_bar=False,
    )
    trainer.fit(model, loader(workers=1), validation(1))
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(weights).hexdigest()[:16], trainer.global_step
