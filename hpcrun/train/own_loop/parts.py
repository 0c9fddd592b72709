"""The objects of a loop by name, and where a checkpoint has each of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from hpcrun.checkpoint.state.bucket_order import BucketOrder
from hpcrun.checkpoint.state.hook_state import HookStates
from hpcrun.checkpoint.state.tree import bare
from hpcrun.errors import UserError
from hpcrun.train.own_loop.own_objects import OwnObject, is_own
from hpcrun.train.own_loop.unsaved_state import unsaved_weights


@dataclass(frozen=True)
class Parts:
    """The objects that ``hpcrun.resumable`` was given, each kind by name; ``others`` as they are."""

    models: dict[str, Any]
    optimizers: dict[str, Any]
    schedulers: dict[str, Any]
    loaders: dict[str, Any]
    scalers: dict[str, Any]
    others: dict[str, Any]

    @property
    def model(self) -> nn.Module:
        """The only model, or a module of all of them."""
        if len(self.models) == 1:
            only: nn.Module = next(iter(self.models.values()))
            return only
        return nn.ModuleDict(
            {name.replace(".", "_"): bare(one) for name, one in self.models.items()}
        )

    @property
    def saved(self) -> dict[str, Any]:
        """All objects that a checkpoint has, by name."""
        named = self.models | self.optimizers | self.schedulers | self.scalers
        return named | self.others

    def state(self, loop: Any, model: nn.Module, *, same_weights: bool) -> dict[str, Any]:
        """Return the state of the training, as arguments of :class:`hpcrun.Checkpointer`.

        Args:
            loop: the state of the loop on each rank.
            model: the result of :attr:`model`.
            same_weights: False: each rank saves its own models and optimizers.
        """
        models, optimizers, others = self.models, self.optimizers, self.others
        first = next((name for name, one in optimizers.items() if isinstance(one, Optimizer)), "")
        known = [*models.values(), *optimizers.values(), *self.schedulers.values()]
        known += [part for one in models.values() for part in one.modules()]
        own: dict[str, Any] = {"loop": loop}
        if not same_weights:
            own |= {f"model.{name}": bare(one) for name, one in models.items()}
            own |= {f"optimizer.{name}": one for name, one in optimizers.items()}
        own |= {name: OwnObject(name, one, known) for name, one in others.items() if is_own(one)}
        extra = {name: one for name, one in others.items() if name not in own}
        extra |= {name: one for name, one in optimizers.items() if name != first}
        for several in (self.schedulers, self.scalers):
            extra |= {name: several[name] for name in list(several)[1:]}
        extra |= {f"buckets.{name}": BucketOrder(one) for name, one in models.items()}
        if len(models) > 1:  # The module of all models has none of their wrappers.
            own |= {
                f"hooks.{name}": HookStates([one], buckets=BucketOrder(one, for_hooks=True))
                for name, one in models.items()
            }
        return {
            "model": model,
            # A checkpoint has an optimizer of torch.
            "optimizer": optimizers.get(first)
            or SGD(next(iter(models.values())).parameters(), lr=0.0),
            "scheduler": next(iter(self.schedulers.values()), None),
            "scaler": next(iter(self.scalers.values()), None),
            "extra": extra,
            "own": own,
        }

    def lines(self) -> list[str]:
        """Return remarks on what a checkpoint may miss."""
        lines = []
        if not self.optimizers and not any(hasattr(one, "step") for one in self.others.values()):
            lines.append(_BY_HAND)
        held = self.models | self.schedulers | self.scalers | self.others
        if line := unsaved_weights(self.optimizers, held):
            lines.append(line)
        return lines


def named_parts(parts: Mapping[str, Any], others: dict[str, Any]) -> Parts:
    """Name the objects of the arguments, and check models and optimizers.

    Args:
        parts: each argument of ``hpcrun.resumable`` for objects of one kind: one object, a list or a dict.
        others: its further objects.

    Raises:
        UserError: a model or an optimizer cannot be saved.
    """
    named = {f"{kind}s": _named(kind, one) for kind, one in parts.items()}
    _require_usable(named["models"], named["optimizers"])
    return Parts(**named, others=others)


def _named(kind: str, value: Any) -> dict[str, Any]:
    """Return the objects of an argument by name: ``model``, ``model.0`` or ``model.key``."""
    if isinstance(value, Mapping):
        return {f"{kind}.{key}": one for key, one in value.items()}
    if isinstance(value, list | tuple):
        return {f"{kind}.{number}": one for number, one in enumerate(value)}
    return {} if value is None else {kind: value}


def _require_usable(models: dict[str, Any], optimizers: dict[str, Any]) -> None:
    if not models:
        raise UserError("model: is missing; pass model=, one Module or several")
    for name, one in models.items():
        if not isinstance(one, nn.Module):
            raise UserError(
                f"{name}: is a {type(one).__name__}, not a Module; pass it by another name"
            )
        if hasattr(one, "_forward_module"):
            raise UserError(
                f"{name}: is a {type(one).__name__} of Lightning Fabric, and its state_dict() has other "
                "names than its weights; pass model=model._forward_module and optimizer=optimizer.optimizer"
            )
    for name, one in optimizers.items():
        if not all(callable(getattr(one, way, None)) for way in ("state_dict", "load_state_dict")):
            raise UserError(
                f"{name}: a {type(one).__name__} has no state_dict() and load_state_dict(), so a checkpoint "
                "would miss its state; define both, or pass the optimizer that it wraps"
            )


_BY_HAND = (
    "hpcrun.resumable() has no optimizer=, so the loop must update the weights itself; a value that the "
    "update carries from step to step, such as a momentum or a learning rate, belongs in a dict that you pass"
)
