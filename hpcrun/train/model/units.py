"""Choose the units of FSDP by their size, or by a policy of the user's."""

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from hpcrun.train.model.prepare import EMBEDDINGS, has_own_weights, unshared

_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

Policy = Callable[..., bool] | int
"""The argument ``auto_wrap_policy`` of :func:`hpcrun.wrap_model_fsdp`."""


def by_size(module: nn.Module, parameters: int) -> list[nn.Module]:
    """Return the smallest submodules with at least ``parameters`` elements, inner ones first.

    Parameters of a chosen submodule do not count again for its parents. An embedding and a submodule with
    tied weights are never chosen; their weights count for the next eligible parent.
    """
    taken: set[int] = set()
    separate = has_own_weights(module)

    def large(part: nn.Module) -> bool:
        own = {id(p): p.numel() for p in part.parameters() if id(p) not in taken}
        if isinstance(part, (*_NEVER_CALLED, *EMBEDDINGS)) or sum(own.values()) < parameters:
            return False
        if not separate(part):
            return False
        taken.update(own)
        return True

    return _below(module, large)


def by_policy(module: nn.Module, policy: Policy) -> list[nn.Module]:
    """Return the submodules that ``policy`` chooses, inner ones first, without those with tied weights.

    Args:
        module: the model.
        policy: a number of parameters, as for :func:`by_size`; a function of a module that returns True for a
            unit; or a policy of ``torch.distributed.fsdp.wrap`` with the arguments ``module``, ``recurse``
            and ``nonwrapped_numel``.

    Raises:
        TypeError: the policy is neither a number nor a function.
        ValueError: the number is below 1.
    """
    if isinstance(policy, int) and not isinstance(policy, bool):
        if policy < 1:
            raise ValueError(f"auto_wrap_policy={policy}: give at least 1 parameter per unit")
        return by_size(module, policy)
    if not callable(policy):
        raise TypeError(
            f"auto_wrap_policy: a {type(policy).__name__} is no policy; give a number of parameters, a "
            "function of a module, or functools.partial(size_based_auto_wrap_policy, min_num_params=…)"
        )
    asked: Callable[..., bool] = policy if _of_torch(policy) else partial(_plain, policy)
    found: dict[int, nn.Module] = {}
    _walk(module, asked, found)
    found.pop(id(module), None)
    never = [part for part in found.values() if isinstance(part, _NEVER_CALLED)]
    return unshared(module, [part for part in found.values() if part not in never])


def _plain(policy: Callable[..., bool], *, module: nn.Module, recurse: bool, **_: Any) -> bool:
    return recurse or bool(policy(module))


def _of_torch(policy: Callable[..., bool]) -> bool:
    """Return True for a policy with the arguments of ``torch.distributed.fsdp.wrap``."""
    known = signature(policy).parameters
    named = {name for name, one in known.items() if one.kind is not Parameter.VAR_KEYWORD}
    return "recurse" in named


def _walk(part: nn.Module, policy: Callable[..., bool], found: dict[int, nn.Module]) -> int:
    """Collect the units below and at ``part``, as FSDP1 wraps; return the number of their parameters."""
    inside = sum(parameter.numel() for parameter in part.parameters())
    if isinstance(part, nn.MultiheadAttention):
        # It uses the weights of its submodules without calling them.
        wrapped = 0
    elif policy(module=part, recurse=True, nonwrapped_numel=inside):
        wrapped = sum(_walk(child, policy, found) for child in part.children())
    else:
        return 0
    if not policy(module=part, recurse=False, nonwrapped_numel=inside - wrapped):
        return wrapped
    found.setdefault(id(part), part)
    return inside


def _below(module: nn.Module, chosen: Callable[[nn.Module], bool]) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}

    def walk(parent: nn.Module) -> None:
        # MultiheadAttention uses the weights of its submodules without calling them.
        if isinstance(parent, nn.MultiheadAttention):
            return
        for child in parent.children():
            inner = (
                child._checkpoint_wrapped_module if isinstance(child, CheckpointWrapper) else child
            )
            walk(inner)
            if id(child) not in found and chosen(child):
                found[id(child)] = child

    walk(module)
    return list(found.values())
