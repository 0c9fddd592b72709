"""A packed corpus as samples: fixed windows over its bytes.

Windows depend on nothing but their number, so the order of samples stays the training loop's
business, and a resumed run reads exactly the bytes it would have read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class ByteWindows(Dataset[Tensor]):
    """Window i is bytes [i * context, (i + 1) * context], ends included: uint8 [context + 1].

    The last byte of a window is the first of the next: it is only ever predicted here, and seen
    there. What is left at the end and fills no window is dropped. The file is opened by the process
    that reads, on its first sample, so the data set can be sent to or forked into loader processes.
    """

    def __init__(self, path: Path, split: str, size: int, context: int) -> None:
        """``size`` is the number of bytes of ``split`` in the corpus at ``path``."""
        self.path = path
        self.split = split
        self.context = context
        self.count = (size - 1) // context
        self._bytes: Any = None
        self._opened_by = -1

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        # HDF5's handles belong to the process that opened them, not to one forked from it.
        if self._opened_by != os.getpid():
            import h5py

            # Locks are refused by some cluster file systems, and nobody writes this file in place.
            self._bytes = h5py.File(self.path, "r", locking=False)[self.split]["bytes"]
            self._opened_by = os.getpid()
        start = index * self.context
        return torch.from_numpy(self._bytes[start : start + self.context + 1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None, "_opened_by": -1}
