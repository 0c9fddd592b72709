"""Dataset of fixed windows over the bytes of a packed corpus.

A window depends only on its index, so the training loop controls the order of samples, and a resumed run
reads exactly the same bytes.
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

    The last byte of a window, which is only predicted there, is the first byte of the next window. Bytes at
    the end that do not fill a window are dropped. Each process opens the file at its first sample, so the
    dataset can be sent to or forked into loader processes.
    """

    def __init__(self, path: Path, split: str, size: int, context: int) -> None:
        """``size``: number of bytes of ``split`` in the corpus at ``path``."""
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
        # HDF5's handles belong to the process that opened them, not to its forked children.
        if self._opened_by != os.getpid():
            import h5py

            # Some cluster file systems refuse locks, and this file is never changed in place.
            self._bytes = h5py.File(self.path, "r", locking=False)[self.split]["bytes"]
            self._opened_by = os.getpid()
        start = index * self.context
        return torch.from_numpy(self._bytes[start : start + self.context + 1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None, "_opened_by": -1}
