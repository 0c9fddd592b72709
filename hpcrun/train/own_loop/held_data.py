"""A mark of the data that a dataset holds in memory, by which a resume notices other data.

A dataset of random numbers without a seed, or an unseeded ``random_split``, is another dataset at each start.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset

# Numbers of parts of a sequence, and of elements of a tensor: a mapped file is read at so many places.
_PARTS, _INNER, _ELEMENTS, _DEPTH = 64, 8, 64, 5
# Bytes that are read whole.
_SMALL = 1 << 16


class HeldData:
    """Marks of the data of several loaders.

    Args:
        datasets: by the names of their loaders.

    Attributes:
        marks: the marks, plain data for the checkpoint.
        line: which data differs from that of the checkpoint, and the remedy; empty if none does.
    """

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self._kinds = {name: type(one).__name__ for name, one in datasets.items()}
        self.marks = {name: held_data(one) for name, one in datasets.items()}
        self.line = ""

    def compare(self, saved: Mapping[str, str | None]) -> None:
        """Compare with the marks of a checkpoint, and set :attr:`line`."""
        both = self.marks.keys() & saved.keys()
        other = [name for name in sorted(both) if self.marks[name] != saved[name]]
        if other:
            names = ", ".join(f"{name} ({self._kinds[name]})" for name in other)
            self.line = (
                f"{names}: holds other data in memory than before the interruption, so the training "
                "continues with other samples; set a seed before the data or its split is made, such as "
                "torch.manual_seed(0), or read the data from files"
            )


def held_data(dataset: Any) -> str | None:
    """Return a hash of tensors, arrays and lists of numbers in ``dataset``; None if it holds none of them.

    Equal data gives equal text in every process. Of large data a few places count. Single numbers and texts
    do not count: counters change, and paths of a node's disk differ between jobs. No sample is read, since a
    dataset may open files that its workers must not inherit.

    Args:
        dataset: of a ``DataLoader``.
    """
    content = xxhash.xxh3_64()
    return content.hexdigest() if _add(content, dataset, _DEPTH) else None


def _add(content: Any, value: Any, depth: int, *, inside: bool = False) -> bool:
    """Add ``value`` to the hash, and return True if it is data.

    Args:
        inside: ``value`` is an element of a sequence.
    """
    if isinstance(value, Tensor):
        content.update(f"{tuple(value.shape)} {value.dtype}".encode())
        return _add_array(content, _on_cpu(value))
    if isinstance(value, np.ndarray):
        return _add_array(content, value)
    if inside and isinstance(value, bool | int | float | complex | np.generic):
        content.update(repr(value).encode())
        return True
    if not depth:
        return False
    if isinstance(value, list | tuple | range):
        content.update(f"{len(value)} parts".encode())
        parts = [_add(content, part, depth - 1, inside=True) for part in _some(value, depth)]
        return any(parts)
    if isinstance(value, Dataset) or depth == _DEPTH:
        held = sorted(getattr(value, "__dict__", {}).items())
        attributes = [_add(content, part, depth - 1) for _, part in held]
        return any(attributes)
    return False


def _some(values: Sequence[Any], depth: int) -> list[Any]:
    """Return evenly spaced elements; fewer of a sequence in a sequence."""
    count, most = len(values), _PARTS if depth >= _DEPTH - 1 else _INNER
    if count <= most:
        return list(values)
    return [values[index * (count - 1) // (most - 1)] for index in range(most)]


def _on_cpu(value: Tensor) -> "np.ndarray[Any, Any] | None":
    """Return some elements of a tensor; None for a tensor without ordinary memory."""
    if (
        type(value) is not Tensor
        or value.layout is not torch.strided
        or value.is_meta
        or value.is_quantized
    ):
        return None
    flat = value.detach()
    if flat.nbytes > _SMALL:
        places = torch.linspace(0, flat.numel() - 1, _ELEMENTS, dtype=torch.float64).long()
        index = np.unravel_index(places.numpy(), tuple(flat.shape))
        flat = flat[tuple(torch.from_numpy(one).to(flat.device) for one in index)]
    return flat.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def _add_array(content: Any, value: "np.ndarray[Any, Any] | None") -> bool:
    if value is None or value.dtype.hasobject or not value.size:
        return False
    content.update(f"{value.shape} {value.dtype}".encode())
    if value.nbytes > _SMALL:
        places = np.linspace(0, value.size - 1, _ELEMENTS).astype(np.int64)
        value = value[np.unravel_index(places, value.shape)]
    content.update(np.ascontiguousarray(value).tobytes())
    return True
