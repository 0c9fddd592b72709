"""Task: the class that a user writes to train a model, if the built-in tasks do not fit."""

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpcrun.config import Config
from hpcrun.errors import NotTrainable, UserError
from hpcrun.folders import shipped_example
from hpcrun.run.endings import place_of

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset


class Task(ABC):
    """A model, its data and its loss. Subclass it and name it in the config: ``task: my_module:MyTask``.

    Every rank makes one object. All randomness in a sample must come from its index or from the global
    generators of torch, numpy and random: checkpoints hold these generators, and loader processes seed them
    for each sample from its position.

    A task must not keep state: a resumed training starts with a new object, and :meth:`loss` is called
    more often than steps are taken. A value that changes during training, such as a weight with warm-up,
    must be a function of :attr:`step`; learned values belong in the model, as parameters or buffers.
    """

    unit: str = "samples"
    """The unit of throughput."""

    units_per_sample: int = 1
    """Number of ``unit`` per sample (e.g. tokens in a sequence)."""

    flops_per_sample: float | None = None
    """Floating-point operations of a training step per sample, forward and backward, for MFU (model FLOPs
    utilization); None: torch counts them."""

    loader_processes: int | None = None
    """Default of ``data.workers``, such as 0 for samples that take microseconds; None: by the cores."""

    draws_weights: bool = False
    """True if the model has a method ``draw_weights()`` that sets each parameter, also after sharding: see
    docs/large-models.md. FSDP then builds the model without memory on every rank, and calls the method."""

    # Name-mangled, so that it cannot collide with an attribute of a user's class.
    __step = 0

    def __init__(self, config: Config) -> None:
        """Keep the config as ``self.config``.

        Args:
            config: the resolved config; ``config.model`` and ``config.data`` hold the task's keys.
        """
        self.config = config

    @property
    def step(self) -> int:
        """Number of steps taken so far in the whole training: the index of the current step, from 0.

        Use this number in :meth:`loss`, :meth:`weight` and :meth:`report`, but not in a dataset: loader
        processes read ahead.
        """
        return self.__step

    @step.setter
    def step(self, value: Any) -> None:
        raise NotTrainable(
            f"{type(self).__name__} sets step, which hpcrun uses for the number of steps taken so far; "
            "rename the attribute"
        )

    def _reached(self, step: int) -> None:
        """Record that ``step`` steps have been taken; called by the loop."""
        self.__step = step

    def _require_weights_of(self, source: str) -> None:
        """Raise UserError if the files ``source`` (``train.init_from``) describe another model."""

    def prepare(self) -> None:
        """Make the data ready, e.g. download it. Called on rank 0 only, before any rank opens the data.

        With hang detection, the time limit of the call is 48 times ``train.hang_start`` seconds.
        """

    @abstractmethod
    def build_model(self) -> "nn.Module":
        """Return the model, on the CPU. The generators have the same seed on every rank.

        With FSDP the call is recorded with tensors that have no memory; if that is not possible, there is a
        second call: docs/large-models.md.
        """

    @abstractmethod
    def train_dataset(self) -> "Dataset[Any]":
        """Return a map-style dataset or a stream; :meth:`collate` gets its items.

        A map-style dataset may define its order: ``sample_order(positions, seed)`` returns the index at each
        global position (int64 arrays), and must depend on nothing else.
        A stream is an ``IterableDataset`` with ``state_dict()`` and ``load_state_dict(state)``. Its attribute
        ``shards_itself`` is True if each rank iterates its own samples: docs/checkpointing.md, Streams.
        """

    def validation_dataset(self) -> "Dataset[Any] | None":
        """Return a map-style dataset for validation, or None for no validation."""
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Return the batch of one or more ``samples``; the default stacks them (``default_collate``).

        Used for training and validation, in the loader processes if there are any. In the result, every
        object with ``to(device)`` is moved to the device, also inside dicts, lists, tuples and dataclasses.
        """
        from torch.utils.data import default_collate

        return default_collate(samples)

    def build_optimizer(
        self, model: "nn.Module"
    ) -> "Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None":
        """Return your own optimizer, or a list or a dict of several; None: the optimizer in ``optim``.

        Several optimizers have different parameters and step one after the other. The schedule
        multiplies each group's own learning rate.

        Args:
            model: the model of :meth:`build_model`, on its device, with the parameters to train. With FSDP
                they are sharded already. Blocks with activation checkpointing are wrapped;
                ``hpcrun.named_parameters(model)`` gives the names without ``_checkpoint_wrapped_module.``.
        """
        return None

    @abstractmethod
    def loss(self, model: "nn.Module", batch: Any) -> "Tensor":
        """Return the mean loss over the samples of ``batch``, a floating-point tensor of shape ().

        Called under autocast. Call ``model(...)`` itself: with several ranks the model is a wrapper without
        your other methods. The first step of each process calls the loss once more (see
        ``DistributedAMPTrainer``).

        Args:
            model: the module for forward passes.
            batch: a micro-batch of :meth:`collate` on the device; the first dimension counts samples.
        """

    def weight(self, batch: Any) -> "Tensor | float | None":
        """Return the weight of :meth:`loss` for ``batch``, such as its number of tokens without padding.

        The loss over all micro-batches of all ranks, and in validation, is then the weighted mean. The weight
        is a number or a tensor of one element. ``batch`` comes from the data loader and is not on the device
        yet. None for all batches: every sample has the same weight.

        The loss of a batch of weight 0 may be NaN, but its gradient must be zero or finite: divide by
        ``mask.sum().clamp(min=1)``, not by ``mask.sum()``. A weight that is NaN, infinite or negative skips
        the step on all ranks.
        """
        return None

    def report(self, model: "nn.Module", validation_loss: float | None) -> dict[str, Any]:
        """Return entries for result.json when training is finished, as plain JSON. Called on rank 0 only.

        Args:
            model: the model with the weights of the lowest validation loss if ``checkpoint.keep_best`` has
                kept them, otherwise with the last weights.
            validation_loss: the loss of these weights; None without validation.
        """
        return {}


def load_task(config: Config) -> Task:
    """Import the task that ``config.task`` names (``module:Class``) and make it.

    Raises:
        UserError: there is no such module or class, or it raised; the message names the cause.
    """
    module_name, _, class_name = config.task.partition(":")
    if not class_name:
        raise UserError(f"task: {config.task}: write it as module:Class")
    try:
        module = _imported(module_name)
    # A script without a main guard may exit, even with code 0, which would look like a finished training.
    except (Exception, SystemExit) as error:
        raise UserError(f"task: {config.task}: importing it raised {_summary(error)}") from error
    kind = getattr(module, class_name, None)
    if kind is None:
        raise UserError(
            f"task: {config.task}: {module_name} has no {class_name}; name one of its Task classes"
        )
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise UserError(
            f"task: {config.task}: is not a subclass of hpcrun.Task; derive it from hpcrun.Task"
        )
    try:
        task: Task = kind(config)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task: {config.task}: the constructor raised {_summary(error)}") from error
    for name, own in vars(Task).items():
        if callable(own) and not callable(given := getattr(task, name)):
            raise UserError(f"task: {config.task}: {name} is {given!r}; write it as a method")
    return task


def _imported(name: str) -> ModuleType:
    """Import a module: of the working folder or ``sys.path``, otherwise of the examples that hpcrun has."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        example = shipped_example(name)
        if example is None or error.name not in ("examples", name):
            raise
    # The examples import each other by this name.
    package = sys.modules.setdefault("examples", ModuleType("examples"))
    package.__path__ = [*getattr(package, "__path__", ()), str(example.parent)]
    return importlib.import_module(name)


def _summary(error: BaseException) -> str:
    """Return class, message and, if it is outside this file, the place of ``error`` on one line."""
    where, _ = place_of(error)
    own = f"{__file__}:"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" + (
        f" ({where})" if where and not where.startswith(own) else ""
    )
