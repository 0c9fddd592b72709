"""What to train: the one class that a user writes when the built-in tasks do not fit."""

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.run.traces import place_of
from hpcrun.train.errors import NotTrainable

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset


class Task(ABC):
    """A model, its data and its loss. Subclass it and name it in the config: ``task: my_module:MyTask``.

    One object is made on every rank. Whatever is random about a sample must come from its index or
    from the global generators of torch, numpy and random: these are saved with the checkpoint, and
    in the processes of a data loader they are seeded anew for each sample, from its position.

    A task keeps no state of its own: a resumed training begins with a new object, and :meth:`loss` is
    asked more often than steps are taken. What changes over a training, such as a weight that is warmed
    up, is a function of :attr:`step`; what is learned belongs into the model, as a parameter or a buffer.
    """

    unit: str = "samples"
    """What throughput counts."""

    units_per_sample: int = 1
    """How many of ``unit`` a sample holds (tokens in a sequence, say)."""

    flops_per_sample: float | None = None
    """Floating-point operations of a training step per sample, for MFU; None: counted by torch."""

    # Mangled, so that no attribute of a user's own class can be meant.
    __step = 0

    def __init__(self, config: Config) -> None:
        """``config``: the resolved one; ``config.model`` and ``config.data`` hold the task's own keys."""
        self.config = config

    @property
    def step(self) -> int:
        """The steps taken so far, in the whole training: the number of the one that is computed, from 0.

        For :meth:`loss`, :meth:`weight` and :meth:`report`. A dataset must not ask for it: loader
        processes read ahead.
        """
        return self.__step

    @step.setter
    def step(self, value: Any) -> None:
        raise NotTrainable(
            f"{type(self).__name__} sets step, by which a task is told the steps taken so far; name its own "
            "attribute otherwise"
        )

    def _reached(self, step: int) -> None:
        """For the loop: ``step`` steps have been taken."""
        self.__step = step

    def prepare(self) -> None:
        """Make the data ready. Called on rank 0 only, before any rank opens it."""

    @abstractmethod
    def build_model(self) -> "nn.Module":
        """The model, on the CPU. The generators are seeded alike on every rank."""

    @abstractmethod
    def train_dataset(self) -> "Dataset[Any]":
        """A map-style dataset, or a stream; its items are what :meth:`collate` accepts.

        A stream is an ``IterableDataset`` with ``state_dict()`` and ``load_state_dict(state)``, which says
        by ``shards_itself`` whether each rank iterates samples of its own: docs/checkpointing.md, Streams.
        """

    def validation_dataset(self) -> "Dataset[Any] | None":
        """A map-style dataset to validate on, or None for no validation."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        """The batch of ``samples``, one or more: ``torch.utils.data.default_collate``, which stacks them.

        For training and for validation, in the loader processes where there are any. Of what it gives, what
        has a ``to(device)`` is moved to the device, also within dicts, lists, tuples and data classes.
        """
        from torch.utils.data import default_collate

        return default_collate(samples)

    def build_optimizer(self, model: "nn.Module") -> "Optimizer | None":
        """An optimiser of your own, or None for the one that ``optim`` names.

        The schedule and ``train.lr_scaling`` multiply each group's own learning rate.

        Args:
            model: as :meth:`build_model` made it, on its device, its parameters those that are trained:
                under FSDP they are sharded by now. Blocks that are recomputed are wrapped: in
                ``hpcrun.checkpoint.state.names.named_parameters(model)`` the names are without
                ``_checkpoint_wrapped_module.``.
        """
        return None

    @abstractmethod
    def loss(self, model: "nn.Module", batch: Any) -> "Tensor":
        """The mean loss over the samples of ``batch`` (first dimension: samples), a scalar.

        Call ``model(...)`` itself: with several ranks it is a wrapper that has no other methods. The
        first step of each process asks once more than it takes (see ``DistributedAMPTrainer``).
        """

    def weight(self, batch: Any) -> "Tensor | float | None":
        """How much :meth:`loss` of ``batch`` counts, such as its number of tokens that are not padding.

        Over all micro-batches of all ranks, and in validation, the loss is then the mean weighted so.
        ``batch`` is as the data loader gave it, not yet on the device. None, the same for all batches:
        every sample counts alike. A batch of weight 0 may have no loss (not a number), but its gradient
        must be zero or finite: divide by ``mask.sum().clamp(min=1)``, not by ``mask.sum()``. A weight that is
        no number, infinite or below zero skips the step on all ranks.
        """
        return None

    def report(self, model: "nn.Module", validation_loss: float | None) -> dict[str, Any]:
        """What to show and keep in result.json when training is done. Called on rank 0 only.

        ``model`` has the weights with the lowest ``validation_loss`` if ``checkpoint.keep_best`` has kept
        them, otherwise the last ones.
        """
        return {}


def load_task(config: Config) -> Task:
    """Import the task that ``config.task`` names (``module:Class``) and make it.

    Raises:
        UserError: there is no such module or class, or it raised; the line names the cause.
    """
    module_name, _, class_name = config.task.partition(":")
    if not class_name:
        raise UserError(f"task: {config.task}: name it as module:Class")
    try:
        module = importlib.import_module(module_name)
    # A script without a main guard may exit, with 0 even, which would pass for a training that is done.
    except (Exception, SystemExit) as error:
        raise UserError(f"task: {config.task}: importing it raised {_in_short(error)}") from error
    kind = getattr(module, class_name, None)
    if kind is None:
        raise UserError(
            f"task: {config.task}: {module_name} has no {class_name}; name one of its Task classes"
        )
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise UserError(f"task: {config.task}: is no subclass of hpcrun.Task; derive it from there")
    try:
        return kind(config)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task: {config.task}: cannot be made: {_in_short(error)}") from error


def _in_short(error: BaseException) -> str:
    """Kind, message and place of ``error`` on one line; the place, if it lies outside this file."""
    where, _ = place_of(error)
    own = f"{__file__}:"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" + (
        f" ({where})" if where and not where.startswith(own) else ""
    )
