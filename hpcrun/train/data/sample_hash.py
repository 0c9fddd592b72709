"""Hashes of samples and batches, by which a resume and other ranks recognize them."""

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils._pytree import tree_leaves


def comparable(samples: Any) -> str | None:
    """Return a hash of ``samples``; None if a part of them has no bytes, such as an open file."""
    try:
        return hash_of(samples, pickle.dumps)
    except Exception:  # any error of the objects in a sample means that they cannot be compared
        return None


def first_of_stream(batch: Any) -> str | None:
    """Return a hash of a batch; None if all its samples are equal, as in a benchmark."""
    with contextlib.suppress(Exception):  # as in comparable(): objects that cannot be compared
        if not any(map(_varies, tree_leaves(batch))):
            return None
    return comparable(batch)


def _varies(part: Any) -> bool:
    """Return True if a part of a batch may differ from that of other samples."""
    if isinstance(part, torch.Tensor | np.ndarray):
        one: Any = part.reshape(-1) if part.ndim == 0 or len(part) == 1 else part
        return bool((one != one[:1]).any()) or (one.shape == (1,) and bool(one[0] != 0))
    return not isinstance(part, int | float | None)


def hash_of(batch: Any, others: Callable[[Any], bytes] | None = None) -> str:
    """Return a hash of the tensors, arrays, numbers and texts in ``batch``.

    Args:
        others: returns the bytes of other objects; None: they do not count.
    """
    content = xxhash.xxh3_64()
    below = [batch]
    while below:
        value = below.pop()
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().flatten().view(torch.uint8).numpy()
        if isinstance(value, np.ndarray):
            content.update(value.tobytes())
        elif isinstance(value, dict):
            below += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            below += value
        elif isinstance(value, str | bytes | int | float):
            content.update(repr(value).encode())
        elif others is not None:
            content.update(others(value))
    return content.hexdigest()
