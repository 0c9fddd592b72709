"""The built-in task: a language model with the architecture of Llama.

Without files of tokens, the model learns to write Python byte by byte, from the sources of the standard
library. Within a minute its loss is below the unigram entropy, the best loss of a model that ignores the
context.
"""

from __future__ import annotations

import math
import unicodedata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset

from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.tasks import corpus
from hpcrun.tasks.hugging_face import require_same
from hpcrun.tasks.llama import Llama, generate
from hpcrun.tasks.options import BYTES, LanguageModelData, LanguageModelShape
from hpcrun.tasks.windows import Windows
from hpcrun.train.task import Task

SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 200
# At a lower temperature, a model as small as the quick start's writes indentation without end.
SAMPLE_TEMPERATURE = 0.85


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
        """Pack the corpus, or verify the packed one. Raises UserError."""
        if self.data.tokens:
            return
        if not self.corpus.exists():
            corpus.pack(corpus.standard_library(), self.corpus, self.data)
        corpus.verify(self.corpus)

    def build_model(self) -> nn.Module:
        if self.config.train.init_from is not None:
            require_same(self.shape, Path(self.config.train.init_from))
        return Llama(self.shape, seed=self.config.seed)

    def train_dataset(self) -> Dataset[Tensor]:
        if not self.data.tokens:
            return self._split("train")
        return ConcatDataset([self._windows(path) for path in self.data.tokens])

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
            "corpus_sha256": corpus.hashes(self.corpus)["train"],
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
