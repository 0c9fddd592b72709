"""Streams of other packages that do not restore the exact position from their state."""

import inspect
from collections.abc import Callable
from typing import Any

from hpcrun.errors import UserError

_BUFFERED = "BufferShuffled"


def require_exact(stream: Any, workers: int) -> None:
    """Check what is known of ``datasets`` (Hugging Face) and of ``streaming`` (Mosaic).

    Raises:
        UserError: a resume in ``stream`` would repeat or skip samples, or its state needs arguments.
    """
    name = type(stream).__name__
    needed = _needed(stream.state_dict)
    if needed:
        raise UserError(
            f"data: {name}.state_dict() needs {' and '.join(needed)}, which only its own loader knows; give "
            "its samples by index, in a map-style dataset"
        )
    if type(stream).__module__.partition(".")[0] != "datasets":
        return
    if workers:
        # Observed in datasets 5.2: each process reads some of the shards, and the processes share one epoch.
        # The first process to begin a new pass makes the others ignore the state that they load.
        raise UserError(
            f"data.workers: {workers} processes of a {name} of the package datasets do not resume where they "
            "stopped; set data.workers=0, or give the map-style datasets.Dataset"
        )
    if _buffers(getattr(stream, "_ex_iterable", None)):
        raise UserError(
            f"data: the state of {name}.shuffle() lacks the samples in its buffer, so a resume would leave "
            "them out; remove it, or give the map-style datasets.Dataset, which hpcrun shuffles"
        )


def _needed(function: Callable[..., object]) -> list[str]:
    """Return the names of the arguments without a default; none where C code lacks names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind in positional]


def _buffers(part: Any) -> bool:
    """Return True if ``part`` of a pipeline, or one that it reads, shuffles in a buffer."""
    if isinstance(part, list | tuple):
        return any(map(_buffers, part))
    if type(part).__module__.partition(".")[0] != "datasets":
        return False
    inner = (getattr(part, key, None) for key in ("ex_iterable", "ex_iterables"))
    return type(part).__name__.startswith(_BUFFERED) or any(map(_buffers, inner))
