"""The built-in task: a language model with the architecture of Llama.

Without files of tokens, the model learns to write Python byte by byte, from the sources of the standard
library. Within a minute its loss is below the unigram entropy, the best loss of a model that ignores the
context.
"""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset

from hpcrun.config import Config
from hpcrun.config.tasks.hugging_face import require_same
from hpcrun.config.tasks.language_model import BYTES, LanguageModelData, LanguageModelShape
from hpcrun.errors import UserError
from hpcrun.tasks import corpus
from hpcrun.tasks.llama import Llama, generate
from hpcrun.train.task import Task

SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 200
# At a lower temperature, a model as small as the quick start's writes indentation without end.
SAMPLE_TEMPERATURE = 0.85


class Windows(Dataset[Tensor]):
    """Windows of a flat, memory-mapped file of tokens: little-endian numbers without a header, as of nanoGPT.

    Window i has the tokens [i * context, (i + 1) * context], ends included: uint8 or int64 [context + 1]. The
    last token of a window, which is only predicted there, is the first token of the next window.
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


class LanguageModel(Task):
    """Next-token prediction on files of tokens, or on the bytes of Python's standard library."""

    unit = "tokens"
    draws_weights = True
    # The tokens are mapped into memory: a batch from another process takes longer than reading it.
    loader_processes = 0
    options_of_model: type[LanguageModelShape] = LanguageModelShape
    """The model of the keys in the section ``model``; a subclass of the task may have further keys."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shape = self.options_of_model.model_validate(config.model.own)
        self.units_per_sample = self.shape.context
        self.data = data = LanguageModelData.model_validate(config.data.own)
        chosen = data.path or corpus.default_path(data.max_bytes, data.validation_fraction)
        self.corpus = Path(chosen)
        if not data.tokens and self.shape.vocabulary != BYTES:
            raise UserError(
                f"model.vocabulary: {self.shape.vocabulary} tokens, but the corpus has {BYTES} bytes; "
                "name files of tokens in data.tokens, or omit model.vocabulary"
            )

    def prepare(self) -> None:
        """Pack the corpus, if it is not packed yet. Raises UserError."""
        if not self.data.tokens and not self.corpus.exists():
            corpus.pack(corpus.standard_library(), self.corpus, self.data)

    def _require_weights_of(self, source: str) -> None:
        require_same(self.shape, Path(source))

    def build_model(self) -> nn.Module:
        return Llama(self.shape, seed=self.config.seed)

    def train_dataset(self) -> Dataset[Tensor]:
        if not self.data.tokens:
            return self._split("train")
        return ConcatDataset([self._windows(path) for path in self.data.tokens])

    def stand_in_dataset(self, size: int) -> Dataset[Tensor]:
        """Return ``size`` windows of zeros, for `hpcrun estimate` without data."""
        dtype = torch.int64 if self.data.tokens else torch.uint8
        windows: Any = torch.zeros(size, self.shape.context + 1, dtype=dtype)
        return cast("Dataset[Tensor]", windows)

    def validation_dataset(self) -> Dataset[Tensor] | None:
        if not self.data.tokens:
            return self._split("validation")
        files = [self._windows(path) for path in self.data.validation_tokens]
        return ConcatDataset(files) if files else None

    def collate(self, samples: list[Tensor]) -> Tensor:
        """Return the bytes or tokens: uint8 or int64 [samples, context + 1]."""
        tokens = torch.stack(samples)
        if self.data.tokens and (largest := int(tokens.max())) >= self.shape.vocabulary:
            raise UserError(
                f"data.tokens: token {largest} is outside the vocabulary of {self.shape.vocabulary}; "
                "data.dtype or model.vocabulary is wrong, or a file is damaged"
            )
        return tokens

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token."""
        loss: Tensor = model(batch[:, :-1], batch[:, 1:])
        return loss

    def report(self, model: nn.Module, validation_loss: float | None) -> dict[str, Any]:
        """Return losses in nats per token, and of bytes a text sample; keeps the global random state."""
        found: dict[str, Any] = {}
        if validation_loss is not None:
            name = "perplexity" if self.data.tokens else "bits_per_byte"
            per_token = math.exp if self.data.tokens else _bits
            found = {"validation_loss": validation_loss, name: per_token(validation_loss)}
        if self.data.tokens:
            return found
        sample = generate(
            getattr(model, "module", model),
            SAMPLE_PROMPT,
            SAMPLE_BYTES,
            context=self.shape.context,
            temperature=SAMPLE_TEMPERATURE,
            seed=self.config.seed,
        )
        train, validation = self._split("train").tokens, self._split("validation").tokens
        return {
            **found,
            "unigram_entropy": corpus.unigram_entropy(train, validation),
            "sample": printable(sample).rstrip(),
        }

    def _split(self, split: str) -> Windows:
        return Windows(corpus.split_path(self.corpus, split), self.shape.context)

    def _windows(self, path: str) -> Windows:
        return Windows(Path(path), self.shape.context, self.data.dtype)


def _bits(nats: float) -> float:
    return nats / math.log(2)


def printable(text: bytes) -> str:
    """Decode a model's output; replace characters that could control a terminal."""
    letters = text.decode(errors="replace")
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter)[0] != "C" else "\ufffd"
        for letter in letters
    )
