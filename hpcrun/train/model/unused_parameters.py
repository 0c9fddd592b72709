"""Find the parameters on which a loss does not depend: DDP would wait for their gradients forever."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from hpcrun.errors import UserError

# Node of torch.utils.checkpoint(use_reentrant=True); the graph behind it exists only in the backward pass.
_OPAQUE = "CheckpointFunctionBackward"


def reached(loss: Tensor) -> set[Any] | None:
    """Return the nodes of autograd's graph that lead to ``loss``; None if part of the graph is hidden."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == _OPAQUE:
            return None
        waiting += [following for following, _ in node.next_functions]
    return seen


def unreached(loss: Tensor, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Return the names of the trained parameters from which no path leads to ``loss``.

    The list is empty if part of the graph is hidden.
    """
    nodes = reached(loss)
    if nodes is None:
        return []
    used = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    return [name for name, p in parameters if p.requires_grad and id(p) not in used]


def require_all_used(loss: Tensor, module: nn.Module) -> None:
    """Raise UserError if trained parameters of ``module`` get no gradient from ``loss``."""
    names = unreached(loss, module.named_parameters())
    if names:
        raise UserError(
            f"train.find_unused_parameters: the loss does not depend on {shortened(names)}, and DDP would "
            "wait for their gradients; set it to true, or freeze or remove these parameters"
        )


def shortened(names: Sequence[str]) -> str:
    """Return the first three of ``names`` and the number of the rest."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
