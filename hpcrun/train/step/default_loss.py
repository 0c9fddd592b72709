"""The loss of a step without a loss function: the output of the model. And hints for a loss that fails."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hpcrun.errors import UserError


def loss_of_model(model: nn.Module, batch: Any) -> Tensor:
    """Call ``model`` with ``batch`` and return the loss in its output, of shape ().

    A mapping is passed as keywords, a list or tuple as positional arguments, and anything else as one
    argument. The output is a scalar tensor, a mapping with the key ``loss``, an object with the attribute
    ``loss`` (as in transformers), or a tuple with one scalar floating-point tensor.

    Raises:
        UserError: the output has no loss.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, list | tuple):
        output = model(*batch)
    else:
        output = model(batch)
    loss = _loss_in(output)
    if isinstance(model, nn.DataParallel) and isinstance(loss, Tensor) and loss.dim() == 1:
        # DataParallel gathers a number of each GPU.
        loss = loss.mean()
    if not _is_loss(loss):
        raise UserError(
            f"{type(model).__name__} returned {_named(output)}, which has no loss; pass a function, "
            "training_step(batch, loss), or return the loss from the model: a scalar tensor, a dict with "
            "the key loss, an object with the attribute loss, or a tuple with one scalar tensor"
        )
    return loss  # type: ignore[no-any-return]


def _loss_in(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    if isinstance(output, tuple):
        scalars = [value for value in output if _is_loss(value)]
        return scalars[0] if len(scalars) == 1 else None
    return None


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()


def _named(output: Any) -> str:
    if isinstance(output, Tensor):
        return (
            f"a tensor of shape {tuple(output.shape)} in {str(output.dtype).removeprefix('torch.')}"
        )
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with the keys {', '.join(map(str, output)) or 'none'}"
    if isinstance(output, tuple):
        return f"a tuple of {len(output)}, not with one scalar floating-point tensor"
    return f"a {type(output).__name__}"


def add_hint(error: Exception, batch: Any, *, own_loss: bool) -> None:
    """Append to ``error`` of a first step how ``training_step`` read a batch that is a list, tuple or dict.

    ``own_loss``: True if the user gave a loss function.
    """
    if isinstance(error, UserError):
        return
    kind = type(batch).__name__
    hint = None
    if own_loss and type(batch) in (list, tuple):
        hint = (
            f"training_step takes one batch, here a {kind} of {len(batch)}, and gives it to the loss as it "
            "is; for several micro-batches pass hpcrun.MicroBatches([...])"
        )
    elif not own_loss and isinstance(batch, Mapping):
        hint = f"without a loss function, the model gets the items of a {kind} batch as keywords"
    elif not own_loss and isinstance(batch, Sequence) and not isinstance(batch, str):
        hint = (
            f"without a loss function, the model gets the {len(batch)} items of a {kind} batch as "
            "positional arguments; for several micro-batches pass hpcrun.MicroBatches([...])"
        )
    if hint is None:
        return
    if hasattr(error, "add_note"):
        error.add_note(hint)
    elif error.args and isinstance(error.args[0], str):
        # Python 3.10 has no notes.
        error.args = (f"{error.args[0]}\n{hint}", *error.args[1:])
