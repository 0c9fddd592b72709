"""Flat files of tokens: windows of a file, memory-mapped, and a check of the tokens.

A file holds numbers of tokens, little-endian without a header, as nanoGPT writes it. Any tokenizer makes such
a file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpcrun.errors import UserError


class Windows(Dataset[Tensor]):
    """Window i of a file is its bytes [i * context, (i + 1) * context], ends included: uint8 [context + 1].

    The last byte of a window, which is only predicted there, is the first byte of the next window.
    """

    def __init__(self, file: Path, context: int, dtype: str = "uint8") -> None:
        """Map ``file``, which holds values of ``dtype`` without a header.

        Raises:
            UserError: the file cannot be read, or does not fill a window.
        """
        self._place = file, context, dtype
        try:
            self.tokens = np.memmap(file, np.dtype(dtype).newbyteorder("<"), "r")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"{file}: cannot be read: {reason}; name a file that every node can read"
            ) from error
        self.context = context
        if not len(self):
            raise UserError(
                f"{file}: {len(self.tokens)} tokens do not fill a sample of {context + 1}; use a smaller "
                "model.context, or more text"
            )

    def __reduce__(self) -> tuple[type[Windows], tuple[Path, int, str]]:
        # A loader process that does not fork maps the file itself.
        return Windows, self._place

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = np.array(self.tokens[start : start + self.context + 1])
        return torch.from_numpy(window if window.itemsize == 1 else window.astype(np.int64))
