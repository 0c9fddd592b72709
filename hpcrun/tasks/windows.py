"""Dataset of fixed windows over the bytes of a packed corpus.

A window depends only on its index, so the training loop controls the order of samples, and a resumed run
reads exactly the same bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpcrun.tasks.corpus import CorpusInfo


class ByteWindows(Dataset[Tensor]):
    """Window i is bytes [i * context, (i + 1) * context], ends included: uint8 [context + 1].

    The last byte of a window, which is only predicted there, is the first byte of the next window. Bytes at
    the end that do not fill a window are dropped. The file is opened at the first sample, so the dataset can
    be sent to loader processes.
    """

    def __init__(self, corpus: CorpusInfo, split: str, size: int, context: int) -> None:
        """``size``: number of bytes of ``split``."""
        self.corpus = corpus
        self.split = split
        self.context = context
        self.count = (size - 1) // context
        self._bytes: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        if self._bytes is None:
            self._bytes = self.corpus.open(self.split)
        start = index * self.context
        return torch.from_numpy(self._bytes[start : start + self.context + 1].copy())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None}
