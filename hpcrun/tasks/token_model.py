"""Task of a GPT on token shards: memory-mapped, packed, mixed by weights.

The order of samples is exact as for every map-style dataset: any number of ranks takes the same samples, and
a resume continues with the next.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset

from hpcrun.config import Config
from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.options import LanguageModelShape, TokenData, TokenModelShape
from hpcrun.tasks.tokens.shards import (
    Shard,
    TokenError,
    TokenSource,
    ends_path,
    has_split,
    open_source,
)
from hpcrun.train.data.batching import Mixture
from hpcrun.train.task import Task

Batch = dict[str, Tensor]


class TokenModel(Task):
    """Next-token prediction on one or more sources of token shards."""

    unit = "tokens"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shape: LanguageModelShape = TokenModelShape.model_validate(config.model.own)
        self.options = TokenData.model_validate(config.data.own)
        self.units_per_sample = self.shape.context

    def prepare(self) -> None:
        """Check the index of every shard, and with ``data.verify`` every hash. Raises TokenError."""
        for source in (*self._sources, *self._held_out):
            for shard in source.shards:
                shard.check(hashes=self.options.verify)

    def build_model(self) -> nn.Module:
        return GPT(self.shape, seed=self.config.seed, vocabulary=self.vocabulary)

    def train_dataset(self) -> Mixture:
        windows = [self._windows(source) for source in self._sources]
        return Mixture(windows, self.options.weights or [len(each) for each in windows])

    def validation_dataset(self) -> Dataset[Batch] | None:
        if not self._held_out:
            return None
        return ConcatDataset([self._windows(source) for source in self._held_out])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats per counted token."""
        tokens, documents = batch["tokens"], batch.get("documents")
        within = self.options.boundaries == "attention"
        seen = documents[:, :-1] if documents is not None and within else None
        logits = model(tokens[:, :-1], seen) if within else model(tokens[:, :-1])
        # Under autocast the logits have half precision, too coarse for a mean over many tokens.
        logits, targets = logits.float().flatten(0, 1), tokens[:, 1:].flatten().long()
        if documents is None:
            return F.cross_entropy(logits, targets)
        counted = _counted(documents).flatten()
        losses = F.cross_entropy(logits, targets, reduction="none")
        return (losses * counted).sum() / counted.sum().clamp(min=1)

    def weight(self, batch: Batch) -> Tensor | None:
        """Return the number of counted tokens, or None if all count."""
        documents = batch.get("documents")
        return None if documents is None else _counted(documents).sum()

    def report(self, model: nn.Module, validation_loss: float | None) -> dict[str, Any]:
        """Return the passes over each source, and the validation loss in nats per token."""
        mixture = self.train_dataset()
        samples = self.step * self.config.train.batch_size
        passes = {
            str(source.path): round(samples * share / size, 4)
            for source, share, size in zip(
                self._sources, mixture.shares(), mixture.sizes, strict=True
            )
        }
        found: dict[str, Any] = {"passes": passes, "vocabulary": self.vocabulary}
        if validation_loss is not None:
            found |= {"validation_loss": validation_loss, "perplexity": math.exp(validation_loss)}
        return found

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the model; raises TokenError if the sources have more, or do not say."""
        known = [source.vocabulary for source in self._sources if source.vocabulary is not None]
        wanted = TokenModelShape.model_validate(self.config.model.own).vocabulary
        if wanted is None and len(known) < len(self._sources):
            raise TokenError(
                "model.vocabulary: a flat file of tokens does not say its vocabulary; set the number of "
                "tokens (GPT-2: 50257)"
            )
        if wanted is not None and wanted < max(known, default=0):
            raise TokenError(
                f"model.vocabulary: {wanted} is less than the {max(known)} of the tokens; raise it, or "
                "omit it"
            )
        return wanted or max(known)

    @cached_property
    def _sources(self) -> list[TokenSource]:
        sources = [open_source(path, "train", self.options.dtype) for path in self._paths]
        _require_same_tokenizer([*sources, *self._held_out])
        return sources

    @cached_property
    def _held_out(self) -> list[TokenSource]:
        """The validation tokens: those of ``data.validation``, or of the folders that have some."""
        if self.options.validation is None:
            paths = [path for path in self._paths if has_split(path, "validation")]
        else:
            paths = [Path(path) for path in self.options.validation]
        return [open_source(path, "validation", self.options.dtype) for path in paths]

    @property
    def _paths(self) -> list[Path]:
        return [Path(path) for path in self.options.paths]

    def _windows(self, source: TokenSource) -> TokenWindows:
        return TokenWindows(
            source,
            self.shape.context,
            self.vocabulary,
            boundaries=self.options.boundaries != "cross",
            end_token=self.options.end_token,
        )


def _counted(documents: Tensor) -> Tensor:
    """Return which predictions stay within a document: bool [samples, context]."""
    return torch.eq(documents[:, 1:], documents[:, :-1])


def _require_same_tokenizer(sources: list[TokenSource]) -> None:
    named = [source for source in sources if source.tokenizer is not None]
    other = next((it for it in named if it.tokenizer != named[0].tokenizer), None)
    if other is not None:
        raise TokenError(
            f"{other.path}: its tokenizer is {other.tokenizer}, but {named[0].path} has "
            f"{named[0].tokenizer}; tokenize all text with the same tokenizer"
        )


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
