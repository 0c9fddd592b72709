"""Which parameters a loss does not depend on: DDP would wait for their gradients in vain."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from hpcrun.errors import UserError

# torch.utils.checkpoint with use_reentrant=True: what lies behind it shows in the backward pass only.
_OPAQUE = "CheckpointFunctionBackward"


def reached(loss: Tensor) -> set[Any] | None:
    """The nodes of autograd's graph that lead to ``loss``; None where a part of the paths cannot be seen."""
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
    """The names of those parameters that are trained, but from which no path leads to ``loss``.

    None, where a part of the paths cannot be seen.
    """
    nodes = reached(loss)
    if nodes is None:
        return []
    used = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    return [name for name, p in parameters if p.requires_grad and id(p) not in used]


def require_all_used(loss: Tensor, module: nn.Module) -> None:
    """Raise UserError if ``loss`` leaves trained parameters of ``module`` without a gradient."""
    names = unreached(loss, module.named_parameters())
    if names:
        raise UserError(
            f"train.find_unused_parameters: the loss does not depend on {shortened(names)}, whose gradients "
            "DDP would wait for; set it to true, or take them out of the model or its training"
        )


def shortened(names: Sequence[str]) -> str:
    """The first three of ``names``, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"
