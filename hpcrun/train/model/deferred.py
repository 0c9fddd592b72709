"""Build a model on rank 0 only, and give each rank its shards after sharding.

The other ranks get the model of rank 0 in a pickle in which the parameters are on the meta device, which has
no memory. So no rank but the first needs memory for the whole model, and no rank can build another model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_leaves

from hpcrun.devices import accelerator
from hpcrun.errors import one_line
from hpcrun.ranks.collective import Ranks

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
    """

    model: nn.Module
    parameters: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    weights: dict[str, nn.Parameter] = field(default_factory=dict)

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


def build_deferred(
    make: Callable[[], Any], ranks: Ranks, task: Any = None
) -> tuple[Any, Deferred | None, str]:
    """Return the result of ``make``, called on rank 0 only, with weights on rank 0 only. Collective.

    Args:
        task: an object whose attributes ``make`` must not set, because it sets them on rank 0 only.

    Returns:
        The model, its parameters, and an empty string; or the model in full, None and the reason.

    Raises:
        Exception: ``make`` failed on a rank.
    """
    model: Any = None
    deferred: Deferred | None = None

    def first() -> tuple[bytes, str]:
        nonlocal model, deferred
        before = _attributes(task)
        model = make()
        try:
            if _attributes(task) != before:
                raise Undeferrable("it sets attributes of the task")
            deferred, packed = deferred_model(model)
        except Undeferrable as error:
            return b"", str(error)
        return packed, ""

    packed, reason = ranks.from_rank_0(first)
    if ranks.rank != 0 and not reason:
        try:
            model = torch.load(BytesIO(packed), weights_only=False)
            deferred = Deferred(model)
            deferred.defer()
        except Exception as error:  # of any type: the other ranks wait for this rank's report
            reason = f"it cannot be unpickled: {one_line(error)}"
    reason = next((text for text in ranks.gather(reason) if text), "")
    if not reason:
        return model, deferred, ""
    if deferred is not None:
        deferred.restore()
    with ranks.agreed():
        return model if ranks.rank == 0 else make(), None, reason


def deferred_model(model: Any) -> tuple[Deferred, bytes]:
    """Move the parameters of ``model`` to the meta device; return them, and the model in a pickle.

    Raises:
        Undeferrable: that is not possible; the model is as before.
    """
    import cloudpickle

    if not isinstance(model, nn.Module):
        raise Undeferrable("it returns no module")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise Undeferrable(f"{name} is on the device meta")
    deferred, packed = Deferred(model), BytesIO()
    try:
        deferred.defer()
        deferred.require_no_alias()
        torch.save(model, packed, pickle_module=cloudpickle)
    except Undeferrable:
        deferred.restore()
        raise
    except Exception as error:  # of any type: those of pickle, and of the model's own methods
        deferred.restore()
        raise Undeferrable(f"it cannot be pickled: {one_line(error)}") from error
    return deferred, packed.getvalue()


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


def _attributes(task: Any) -> dict[str, int]:
    """Return which objects the attributes of ``task`` are."""
    return {name: id(value) for name, value in getattr(task, "__dict__", {}).items()}


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
