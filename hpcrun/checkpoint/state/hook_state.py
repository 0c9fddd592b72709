"""The state of DDP's communication hooks (``register_comm_hook``) in a checkpoint, for each rank.

A hook may keep what it did not send, as PowerSGD does (Vogels, Karimireddy, Jaggi, NeurIPS 2019,
arXiv:1905.13727), and add it to later gradients. This state differs between ranks and decides the weights.
Much of it belongs to a bucket of gradients, so a restore also needs the order of the buckets.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from hpcrun.checkpoint.state.object_state import CONSTANT, ObjectStates, name_of
from hpcrun.checkpoint.state.training import RankPart
from hpcrun.errors import one_line
from hpcrun.storage.errors import CheckpointError

_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
_STEPS_OPTIMIZER = (f"{_OF_TORCH}.ddp_zero_hook", f"{_OF_TORCH}.optimizer_overlap_hooks")
# Options of torch's states; a checkpoint of other options does not fit.
_OPTIONS = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate"),
    *("use_error_feedback", "warm_start", "orthogonalization_epsilon"),
    *("batch_tensors_with_same_shape", "start_localSGD_iter", "post_local_gradient_allreduce"),
)


class Buckets(Protocol):
    """The order of DDP's buckets, as :class:`hpcrun.checkpoint.state.bucket_order.BucketOrder`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the order."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make DDP arrange its buckets in this order."""
        ...


@dataclass(frozen=True)
class Hook:
    """A registered hook: its name, and what its state is read from and restored into."""

    name: str
    function: Any
    state: Any
    objects: ObjectStates
    static_graph: bool = False

    def take(self) -> Any:
        """Return the state, or None for a hook without a state; raises CheckpointError."""
        _require_savable(self)
        where = f"communication hook {self.name}"
        found = {
            "state": self.objects.take(self.state, f"{where}: its state"),
            "function": self.objects.take(self.function, f"{where}: its function"),
        }
        if all(one in (None, CONSTANT) for one in found.values()):
            return None
        if self.static_graph:
            raise CheckpointError(
                f"{where}: with DistributedDataParallel(static_graph=True), a resume gives it other "
                "buckets of gradients than those of its state; remove static_graph"
            )
        return found

    def put(self, saved: Any) -> None:
        """Restore a result of :meth:`take`; raises CheckpointError."""
        where = f"communication hook {self.name}"
        attributes = saved["state"].get("value") if type(saved["state"]) is dict else None
        for option in _OPTIONS:
            here = getattr(self.state, option, None)
            there = attributes.get(option, here) if isinstance(attributes, dict) else here
            if here != there:
                raise CheckpointError(
                    f"{where}: its {option} is {there} in the checkpoint, but {here} here; use the "
                    "same options"
                )
        try:
            self.objects.put(self.state, saved["state"])
            self.objects.put(self.function, saved["function"])
        except Exception as error:  # the user's own code
            raise CheckpointError(
                f"{where} does not accept its state: {one_line(error)}; register the hook that saved it"
            ) from error


class HookStates:
    """The communication hooks of all DDP modules in ``models``, which may be registered later.

    Args:
        models: models that may be in DDP, or have parts in DDP.
        buckets: the order of their buckets, saved with the hooks and restored before them; None: the caller
            takes care of it.
        late: a restore waits for :meth:`begin`, because the caller has not run the backward pass yet in which
            DDP finds its buckets.
    """

    def __init__(
        self, models: Iterable[nn.Module], *, buckets: Buckets | None = None, late: bool = False
    ) -> None:
        self._models, self._buckets, self._late = list(models), buckets, late
        self._pending: Any = None

    @property
    def part(self) -> RankPart:
        """The part of a checkpoint with the hooks of this rank."""
        return RankPart(self.capture, self.restore)

    def capture(self) -> Any:
        """Return the hooks by name with their states, as plain data; None without hooks.

        Raises:
            CheckpointError: the state of a hook cannot be saved; the text says why, with a remedy.
        """
        if self._pending is not None:
            return self._pending
        found = [{"name": hook.name, "state": hook.take()} for hook in hooks_of(self._models)]
        if not found:
            return None
        order = None if self._buckets is None else self._buckets.state_dict()
        return {"hooks": found, "buckets": order}

    def restore(self, saved: Any) -> str | None:
        """Restore a result of :meth:`capture`, and return a note for the user, or None. Collective.

        Args:
            saved: None: the checkpoint has no hooks, or another number of ranks saved it.

        Raises:
            CheckpointError: the checkpoint has the state of a hook that is not registered here.
        """
        hooks = hooks_of(self._models)
        names = [hook.name for hook in hooks]
        if saved is None:
            lost = ", ".join(hook.name for hook in hooks if hook.take() is not None)
            if not lost:
                return None
            return (
                f"the communication hook {lost} starts without its state: the checkpoint has none for this "
                "hook and this number of ranks"
            )
        before = [one["name"] for one in saved["hooks"]]
        if before != names:
            kept = [one["name"] for one in saved["hooks"] if one["state"] is not None]
            here = f"has {' and '.join(names)}" if names else "has none"
            if kept:
                raise CheckpointError(
                    f"the checkpoint has the state of the communication hook {' and '.join(kept)}, and this "
                    f"training {here}; register the same hook before the restore, or begin in another folder"
                )
            return (
                f"the gradients were sent by the communication hook {' and '.join(before)}, and this "
                f"training {here}"
            )
        self._pending = saved
        if not self._late:
            self.begin()
        return None

    def begin(self) -> None:
        """Put a restored state into the hooks: DDP has its buckets now, or finds them here. Collective."""
        self._late = False
        saved, self._pending = self._pending, None
        if saved is None:
            return
        if self._buckets is not None and saved["buckets"] is not None:
            self._buckets.load_state_dict(saved["buckets"])
        for hook, one in zip(hooks_of(self._models), saved["hooks"], strict=True):
            if one["state"] is not None:
                hook.put(one["state"])

    def state_dict(self) -> dict[str, Any]:
        """Return :meth:`capture`, for an object of a checkpoint."""
        return {"hooks": self.capture()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; raises CheckpointError as :meth:`restore`."""
        self.restore(state["hooks"])


def hooks_of(models: Iterable[nn.Module]) -> list[Hook]:
    """Return the hooks that are registered in the DDP modules of ``models``, in order."""
    models = list(models)
    known = frozenset(id(part) for model in models for part in model.modules())
    found = []
    for ddp in (part for model in models for part in model.modules()):
        if not isinstance(ddp, DistributedDataParallel):
            continue
        device = next((p.device for p in ddp.parameters()), torch.device("cpu"))
        for function, state in getattr(ddp, "_comm_hooks", ()):
            objects = ObjectStates(known, device)
            found.append(Hook(name_of(function), function, state, objects, ddp.static_graph))
    return found


@contextlib.contextmanager
def kept_hooks(model: nn.Module) -> Iterator[None]:
    """Restore the state of all hooks after a backward pass in the block that does not count.

    A state that cannot be saved is not restored: only a checkpoint refuses it.
    """
    before = []
    for hook in hooks_of([model]):
        with contextlib.suppress(CheckpointError):
            before.append((hook, hook.take()))
    yield
    for hook, state in before:
        if state is not None:
            hook.put(state)


def _require_savable(hook: Hook) -> None:
    """Raise CheckpointError for a hook of torch that breaks what a checkpoint relies on."""
    function: Callable[..., Any] = hook.function
    if getattr(function, "__module__", "") in _STEPS_OPTIMIZER:
        raise CheckpointError(
            f"communication hook {hook.name}: it steps an optimizer in the backward pass, and a checkpoint "
            "would miss its state; use a hook that only sends gradients, and step the optimizer in the loop"
        )
    state = hook.state
    if not isinstance(state, PostLocalSGDState):
        return
    everyone = dist.get_world_size(state.process_group)
    group = dist.get_world_size(state.subgroup) if state.subgroup is not None else 1
    if not state.post_local_gradient_allreduce or group < everyone:
        raise CheckpointError(
            f"communication hook {hook.name}: it averages gradients within {group} of {everyone} ranks, so "
            "the weights of the ranks differ, and a checkpoint holds those of one; pass a subgroup of all "
            "ranks, or remove the hook"
        )
