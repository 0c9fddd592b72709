"""Dataset of fixed windows over the tokens of a source: documents packed one after the other."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hpcrun.tasks.tokens.shards import Shard, TokenError, TokenSource, ends_path


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Window i of a shard is its tokens [i * context, (i + 1) * context], ends included.

    The documents of a shard follow each other without padding; a window may begin and end within a document.
    The last token of a window, which is only predicted there, is the first token of the next window. Tokens
    at the end of a shard that do not fill a window are dropped. A window depends only on its index.

    A sample has ``tokens``, int32 [context + 1], and with ``boundaries`` also ``documents``, int32
    [context + 1]: the number of each token's document in the window, from 0.
    """

    def __init__(
        self,
        source: TokenSource,
        context: int,
        vocabulary: int,
        *,
        boundaries: bool,
        end_token: int | None = None,
    ) -> None:
        """``end_token``: the last token of every document, for a source without an index of documents.

        Raises:
            TokenError: no shard fills a window, or the source does not know its documents.
        """
        self.source, self.context, self.vocabulary = source, context, vocabulary
        self.boundaries, self.end_token = boundaries, end_token
        counts = [max(0, shard.tokens - 1) // context for shard in source.shards]
        self._starts = [0, *accumulate(counts)]
        if not len(self):
            raise TokenError(
                f"{source.path}: no shard fills a sample of {context + 1} tokens; use a smaller "
                "model.context, or more text"
            )
        if boundaries and end_token is None:
            lacking = next((it.path for it in source.shards if it.documents is None), None)
            if lacking is not None:
                raise TokenError(
                    f"{lacking}: a flat file has no index of documents; set data.end_token, or "
                    "data.boundaries=cross"
                )

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        shard = self.source.shards[number]
        start = (index - self._starts[number]) * self.context
        end = start + self.context + 1
        tokens = np.asarray(shard.values[start:end]).astype(np.int64)
        largest = int(tokens.max())
        if largest >= self.vocabulary:
            raise TokenError(
                f"{shard.path}: token {largest} at {start + int(tokens.argmax())} is outside the vocabulary "
                f"of {self.vocabulary}; the file is damaged, or data.dtype or model.vocabulary is wrong"
            )
        sample = {"tokens": torch.from_numpy(tokens.astype(np.int32))}
        if self.boundaries:
            sample["documents"] = torch.from_numpy(self._documents(shard, tokens, start, end))
        return sample

    def _documents(
        self, shard: Shard, tokens: NDArray[np.int64], start: int, end: int
    ) -> NDArray[np.int32]:
        begins = np.zeros(len(tokens), dtype=np.int32)
        if shard.documents is None:
            begins[1:] = tokens[:-1] == self.end_token
        else:
            ends: Any = shard.ends
            first, last = np.searchsorted(ends, start, "right"), np.searchsorted(ends, end, "left")
            within = np.asarray(ends[first:last]) - start
            if ((within <= 0) | (within >= len(tokens))).any():
                raise TokenError(f"{ends_path(shard.path)}: damaged: its ends do not ascend")
            begins[within] = 1
        documents: NDArray[np.int32] = np.cumsum(begins, dtype=np.int32)
        return documents
