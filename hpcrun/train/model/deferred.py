"""Build a model whose weights only rank 0 has, and give each rank its shards after sharding.

Rank 0 runs the build as always. The other ranks run the same build on the meta device, so that no rank but
the first needs memory for the whole model.
"""

import gc
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcrun.devices import accelerator
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.run.endings import place_of

swap_tensors: Any = torch.utils.swap_tensors
_OF_MODULES = {"_parameters", "_buffers", "_modules"}


class Undeferrable(Exception):
    """Every rank must build the model in full; the text says why."""


@dataclass
class Deferred:
    """A model with its parameters on the meta device.

    Attributes:
        model: the model.
        parameters: a module and its attribute for each parameter, by the parameter's name.
        weights: the values by name on rank 0; empty on the other ranks.
        drawn: True if each rank draws its own shards, and no rank has weights.
    """

    model: nn.Module
    parameters: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    weights: dict[str, nn.Parameter] = field(default_factory=dict)
    drawn: bool = False

    def defer(self) -> None:
        """Move the parameters to the meta device, and keep their values in ``weights``.

        Raises:
            Undeferrable: a parameter has something that the meta device or a shard cannot keep.
        """
        for name, parameter in self.model.named_parameters():
            path, _, attribute = name.rpartition(".")
            self.parameters[name] = self.model.get_submodule(path), attribute
            if not parameter.is_meta:
                self.weights[name] = _to_meta(parameter, name)

    def restore(self) -> None:
        """Give the model its values again."""
        for name, value in self.weights.items():
            module, attribute = self.parameters[name]
            swap_tensors(getattr(module, attribute), value)
        self.weights.clear()

    def require_no_alias(self) -> None:
        """Raise Undeferrable if a buffer or another tensor shares the memory of a parameter."""
        memory = {value.untyped_storage()._cdata for value in self.weights.values()}
        for name, value in _other_tensors(self.model):
            if value.untyped_storage()._cdata in memory:
                raise Undeferrable(f"{name} shares the memory of a parameter")

    def signature(self) -> str:
        """Return a hash of the names, sizes and types of all tensors."""
        found = [*self.model.named_parameters(), *_other_tensors(self.model)]
        lines = sorted((name, tuple(value.shape), str(value.dtype)) for name, value in found)
        return hashlib.sha256(repr(lines).encode()).hexdigest()


def build_drawn(make: Callable[[], Any]) -> tuple[Any, Deferred | None]:
    """Return a model built on the meta device that draws its weights later; None if it cannot do so.

    It has no other tensors than parameters. A subclass of a task may return a model without ``draw_weights``.
    """
    with torch.device("meta"):
        model = make()
    if _other_tensors(model) or not hasattr(model, "draw_weights"):
        return model, None
    deferred = Deferred(model, drawn=True)
    deferred.defer()
    return model, deferred


def build_deferred(make: Callable[[], Any], ranks: Ranks) -> tuple[Any, Deferred | None, str]:
    """Return the result of ``make`` with weights on rank 0 only. Collective.

    Afterwards all ranks have the buffers, and the tensors in attributes of modules, of rank 0.

    Returns:
        The model, its parameters, and an empty string; or the model in full, None and the reason.

    Raises:
        UserError: the program has kept a tensor without values, which the build in full uses.
        Exception: ``make`` failed on rank 0, or a build in full failed on a rank.
    """
    model: Any = None
    deferred: Deferred | None = None
    reason = ""
    with ranks.agreed():
        if ranks.rank == 0:
            model = make()
            deferred, reason = _with_weights(model)
    if ranks.rank != 0:
        deferred, reason = _without_weights(make)
    reports = ranks.gather((reason, deferred.signature() if deferred else ""))
    reason = next((text for text, _ in reports if text), "")
    if not reason and len({signature for _, signature in reports}) > 1:
        reason = "the ranks build different models"
    if deferred is None or reason:
        if deferred is not None and deferred.weights:
            deferred.restore()
        with ranks.agreed():
            if model is None:
                model = make()
                _require_values(model)
        return model, None, reason
    others = [value for _, value in _other_tensors(deferred.model)]
    sent = ranks.from_rank_0(lambda: [value.detach().contiguous() for value in others])
    if ranks.rank != 0:
        for value, given in zip(others, sent, strict=True):
            _assign(value, given)
    return deferred.model, deferred, ""


def _with_weights(model: Any) -> tuple[Deferred | None, str]:
    """Return ``model`` with its parameters on the meta device and their values; or None and a reason."""
    if not isinstance(model, nn.Module):
        return None, "it returns no module"
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return None, f"{name} is on the device meta"
    deferred = Deferred(model)
    try:
        deferred.defer()
        deferred.require_no_alias()
    except (Undeferrable, RuntimeError) as error:
        deferred.restore()
        return None, _line(error)
    return deferred, ""


def _without_weights(make: Callable[[], Any]) -> tuple[Deferred | None, str]:
    """Return the model of ``make`` without weights; or None and a reason."""
    before = _living()
    try:
        with torch.device("meta"), _Draws():  # type: ignore[no-untyped-call]
            model = make()
        if not isinstance(model, nn.Module):
            return None, "it returns no module"
        deferred = Deferred(model)
        deferred.defer()
        deferred.weights.clear()
        inside = [*before, *model.parameters(), *(value for _, value in _other_tensors(model))]
        known = {value.untyped_storage()._cdata for value in inside}
        if any(value.untyped_storage()._cdata not in known for value in _living()):
            return None, "tensors are held outside parameters, buffers and attributes"
    except Exception as error:  # of any type: the build in full decides if the error is the user's
        return None, _line(error)
    return deferred, ""


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random values outside parameters: rank 0 has other ones, since it also draws its parameters."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            for leaf in tree_leaves(found):
                if type(leaf) is Tensor and not leaf.is_meta:
                    raise Undeferrable(f"it draws random values on the device {leaf.device}")
        return found


def _require_values(model: Any) -> None:
    """Raise UserError if ``model`` has a tensor that the first build has made and the program has kept."""
    for name, value in _other_tensors(model) if isinstance(model, nn.Module) else ():
        if value.is_meta:
            raise UserError(
                f"fsdp.deferred_init: {name} has no values, because the program keeps tensors of one build "
                "for the next; set fsdp.deferred_init=false"
            )


def _living() -> list[Tensor]:
    """Return the tensors on the meta device that the program holds."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter) and one.is_meta]


def fill(
    deferred: Deferred, *, device: torch.device, ranks: Ranks, advance: Callable[[], None]
) -> None:
    """Set the shards, which `give_memory` has prepared, to the weights of rank 0. Collective.

    Rank 0 broadcasts one parameter after another, and frees it.
    """
    with torch.no_grad():
        for name in sorted(deferred.parameters):
            module, attribute = deferred.parameters[name]
            shard: Any = getattr(module, attribute)
            if ranks.rank == 0:
                whole = deferred.weights.pop(name).detach().to(device).contiguous()
            else:
                whole = torch.empty(shard.shape, dtype=shard.dtype, device=device)
            dist.broadcast(whole, src=0)
            _keep(shard, whole)
            if accelerator.is_accelerator(device):
                # NCCL counts its timeout from the call, and memory is held until the end: the ranks that wait
                # for rank 0 must not queue all parameters at once.
                accelerator.synchronize_stream(device)
            advance()


def give_memory(module: nn.Module, place: torch.device) -> None:
    """Give the parameters of ``module``, sharded on the meta device, zeros on the device ``place``."""
    root: Any = module
    root._apply(lambda value: torch.zeros_like(value, device=place) if value.is_meta else value)


def _keep(shard: DTensor, whole: Tensor) -> None:
    """Copy this rank's part of ``whole`` into ``shard``."""
    sizes, offsets = compute_local_shape_and_global_offset(
        shard.shape, shard.device_mesh, shard.placements
    )
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dimension, min(offset, whole.shape[dimension]), size)
    shard.to_local().copy_(whole)


def _to_meta(parameter: nn.Parameter, name: str) -> nn.Parameter:
    """Move ``parameter`` to the meta device in place; return its values.

    The object stays the same, so that tied weights stay tied.
    """
    if type(parameter) is not nn.Parameter or parameter.device.type != "cpu":
        kind = type(parameter).__name__
        raise Undeferrable(f"{name} is a {kind} on the device {parameter.device}")
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    if hooks or parameter.grad is not None:
        raise Undeferrable(f"{name} has a hook or a gradient")
    with torch.no_grad():
        empty = torch.empty_like(parameter, device="meta")
    values = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    vars(values).update(vars(parameter))
    swap_tensors(parameter, values)
    return values


def _assign(value: Tensor, given: Tensor) -> None:
    if value.is_meta:
        swap_tensors(value, given)
    else:
        with torch.no_grad():
            value.copy_(given)


def _other_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers, and the tensors in attributes of modules, with their names."""
    found = []
    for path, module in model.named_modules():
        values = [*module._buffers.items()]
        values += [item for item in vars(module).items() if item[0] not in _OF_MODULES]
        for name, value in values:
            if not isinstance(value, (Tensor, list, tuple, dict)):
                continue
            for place, leaf in enumerate(tree_leaves(value)):
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    found.append((f"{path}.{name}[{place}]", leaf))
    return found


def _line(error: Exception) -> str:
    where, _ = place_of(error)
    text = str(error) if isinstance(error, Undeferrable) else f"{type(error).__name__}: {error}"
    return f"{text.splitlines()[0]}{f' at {where}' if where else ''}"
