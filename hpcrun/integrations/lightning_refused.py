"""Settings of a Lightning Trainer with which no resume can be exact, each with its remedy."""

import os
from collections.abc import Iterator
from typing import Any

from hpcrun.errors import UserError

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_CALLBACKS = {
    "StochasticWeightAveraging": "use EMAWeightAveraging or WeightAveraging",
    "BaseFinetuning": "freeze layers in configure_model(), and give each optimizer group its learning rate",
    "LearningRateFinder": "find the learning rate with another Trainer",
    "BatchSizeFinder": "find the batch size with another Trainer",
    "OnExceptionCheckpoint": "remove it: ExactResume saves at a stop",
}


def require_exact(trainer: Any) -> None:
    """Raise UserError if the Trainer has a setting that cannot be exact."""
    for problem in _problems(trainer):
        raise UserError(f"ExactResume: {problem}")


def require_fetcher(loop: Any) -> None:
    """Raise UserError if ``training_step`` takes the iterator, or there is nothing to optimize."""
    if "DataLoaderIter" in type(loop._data_fetcher).__name__:
        raise UserError(
            "ExactResume: training_step(dataloader_iter) fetches batches by itself, so their number is "
            "unknown; define training_step(batch, batch_idx)"
        )
    if not any(group["params"] for one in loop.trainer.optimizers for group in one.param_groups):
        raise UserError("ExactResume: configure_optimizers() returns no optimizer; return one")


def _problems(trainer: Any) -> Iterator[str]:
    started = os.environ.get("WORLD_SIZE", "1")
    if started != str(trainer.world_size) and "HPCRUN_RUN" in os.environ:
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        yield (
            f"Trainer trains on {trainer.world_size} rank(s), and hpcrun has started {started}; pass "
            f'Trainer(devices={int(started) // nodes}, num_nodes={nodes}, strategy="ddp")'
        )
    strategy = trainer.strategy
    if type(strategy).__name__ not in _STRATEGIES:
        yield f"{type(strategy).__name__} is not supported; use one of {', '.join(_STRATEGIES)}"
    if getattr(strategy, "_tensor_parallel_size", 1) not in (1, "auto"):
        yield "tensor parallelism is not supported; pass ModelParallelStrategy(tensor_parallel_size=1)"
    if "MultiProcessing" in type(strategy.launcher).__name__:
        yield 'Trainer starts its ranks by itself; pass strategy="ddp", and start with hpcrun or torchrun'
    if trainer.reload_dataloaders_every_n_epochs:
        yield (
            "reload_dataloaders_every_n_epochs makes loaders that depend on earlier epochs; set it to 0, and "
            "give the dataset a method set_epoch(epoch)"
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval is a time, which no resume repeats; give a number of batches"
    names = [{base.__name__ for base in type(one).__mro__} for one in trainer.callbacks]
    for name, remedy in _CALLBACKS.items():
        if any(name in one for one in names):
            yield f"{name} cannot be resumed exactly; {remedy}"
    if sum("ExactResume" in one for one in names) > 1:
        yield "the Trainer has two ExactResume callbacks; keep one"
