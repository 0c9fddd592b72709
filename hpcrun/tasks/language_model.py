"""Task of the quick start: a small GPT learns to write Python byte by byte.

It needs no download and no tokenizer, and shows within a minute that it learns: compare the loss with the
unigram entropy, which a model that ignores the context can reach.
"""

from __future__ import annotations

import math
import unicodedata
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from hpcrun.config import Config
from hpcrun.tasks import corpus
from hpcrun.tasks.gpt import GPT, generate
from hpcrun.tasks.options.language_model import LanguageModelData, LanguageModelShape
from hpcrun.tasks.windows import ByteWindows
from hpcrun.train.task import Task

SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 200
# At a lower temperature, a model as small as the quick start's writes indentation without end.
SAMPLE_TEMPERATURE = 0.85


class LanguageModel(Task):
    """Next-byte prediction on the Python standard library's sources."""

    unit = "tokens"
    options_of_model: type[LanguageModelShape] = LanguageModelShape
    """The model of the keys in the section ``model``; a subclass of the task may have further keys."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shape = self.options_of_model.model_validate(config.model.own)
        self.options = LanguageModelData.model_validate(config.data.own)
        self.units_per_sample = self.shape.context

    def prepare(self) -> None:
        """Pack the corpus, or verify the packed one. Raises CorpusError."""
        corpus.ensure(self._path, self.options.max_bytes, self.options.validation_fraction)

    def build_model(self) -> nn.Module:
        return GPT(self.shape, seed=self.config.seed)

    def train_dataset(self) -> ByteWindows:
        return self._windows("train", self._corpus.train_bytes)

    def validation_dataset(self) -> ByteWindows:
        return self._windows("validation", self._corpus.validation_bytes)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte; ``batch`` is uint8 [samples, context + 1]."""
        logits = model(batch[:, :-1])
        # Under autocast the logits have half precision, too coarse for a mean over many bytes.
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten().long())

    def report(self, model: nn.Module, validation_loss: float | None) -> dict[str, Any]:
        """Return losses in nats per byte, and a text sample; does not change the global random state."""
        plain = getattr(model, "module", model)
        sample = generate(
            plain,
            SAMPLE_PROMPT,
            SAMPLE_BYTES,
            context=self.shape.context,
            temperature=SAMPLE_TEMPERATURE,
            seed=self.config.seed,
        )
        losses: dict[str, Any] = {}
        if validation_loss is not None:
            losses["validation_loss"] = validation_loss
            losses["bits_per_byte"] = validation_loss / math.log(2)
        return {
            **losses,
            "unigram_entropy": self._corpus.unigram_entropy(),
            "corpus_sha256": self._corpus.sha256,
            "sample": printable(sample).rstrip(),
        }

    @property
    def _path(self) -> Path:
        if self.options.path:
            return Path(self.options.path)
        return corpus.default_path(self.options.max_bytes, self.options.validation_fraction)

    @cached_property
    def _corpus(self) -> corpus.CorpusInfo:
        return corpus.read_info(self._path)

    def _windows(self, split: str, size: int) -> ByteWindows:
        windows = ByteWindows(self._corpus, split, size, self.shape.context)
        if not len(windows):
            raise corpus.CorpusError(
                f"{self._path}: its {split} split of {size} bytes is shorter than one sample; "
                f"use model.context={size - 1} or less, or a larger corpus"
            )
        return windows


def printable(text: bytes) -> str:
    """Decode a model's output; replace characters that could control a terminal."""
    letters = text.decode(errors="replace")
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter)[0] != "C" else "\ufffd"
        for letter in letters
    )
