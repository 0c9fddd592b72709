"""A GPT on your own tokens: flat files, mixed by weights, memory-mapped.

    hpcrun submit -c configs/tokens.yaml

A file holds the numbers of tokens, little-endian uint16 or uint32 without a header, as nanoGPT writes it. Any
tokenizer makes one; documents follow each other, each with the tokenizer's end token:

    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file("tokenizer.json")
    ids = [tokenizer.encode(text + "<|endoftext|>").ids for text in texts]
    np.concatenate(ids).astype("<u2").tofile("web.bin")

The sample at a position is a function of the seed and the position. Any number of ranks takes the same
samples, and a resume continues with the next sample. Copy the file to change it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset

from hpcrun import Config, Mixture, Task, UserError
from hpcrun.config.fields import Count, Positive, Section, ShellText
from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.language_model import Windows
from hpcrun.tasks.options import LanguageModelShape


class TokenModelShape(LanguageModelShape):
    """The ``model`` section."""

    vocabulary: Count = Field(description="Number of tokens of the tokenizer; GPT-2: 50257.")


class TokenData(Section):
    """The task's keys of the ``data`` section."""

    paths: Annotated[list[ShellText], Field(min_length=1)] = Field(
        description="Flat files of tokens to train on."
    )
    weights: list[Positive] | None = Field(
        default=None, description="Share of each file in the samples; null: by its size."
    )
    validation: list[ShellText] = Field(default=[], description="Files to validate on.")
    dtype: Literal["uint16", "uint32"] = Field(default="uint16", description="Type of a token.")


class TokenModel(Task):
    """Next-token prediction on one or more files."""

    unit = "tokens"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shape = TokenModelShape.model_validate(config.model.own)
        self.options = TokenData.model_validate(config.data.own)
        self.units_per_sample = self.shape.context

    def build_model(self) -> nn.Module:
        return GPT(self.shape, seed=self.config.seed, vocabulary=self.shape.vocabulary)

    def train_dataset(self) -> Mixture:
        files = [self._windows(path) for path in self.options.paths]
        return Mixture(files, self.options.weights or [len(file) for file in files])

    def validation_dataset(self) -> Dataset[Tensor] | None:
        files = [self._windows(path) for path in self.options.validation]
        return ConcatDataset(files) if files else None

    def collate(self, samples: list[Tensor]) -> Tensor:
        """Return the tokens, int64 [samples, context + 1]."""
        tokens = torch.stack(samples)
        largest = int(tokens.max())
        if largest >= self.shape.vocabulary:
            raise UserError(
                f"data.paths: token {largest} is outside the vocabulary of {self.shape.vocabulary}; "
                "data.dtype or model.vocabulary is wrong, or a file is damaged"
            )
        return tokens

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per token."""
        # Under autocast the logits have half precision, too coarse for a mean over many tokens.
        logits = model(batch[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def report(self, model: nn.Module, validation_loss: float | None) -> dict[str, Any]:
        """Return the passes over each file, and the validation loss in nats per token."""
        mixture = self.train_dataset()
        samples = self.step * self.config.train.batch_size
        shares = zip(self.options.paths, mixture.shares(), mixture.sizes, strict=True)
        found: dict[str, Any] = {
            "passes": {path: round(samples * share / size, 4) for path, share, size in shares}
        }
        if validation_loss is not None:
            found |= {"validation_loss": validation_loss, "perplexity": math.exp(validation_loss)}
        return found

    def _windows(self, path: str) -> Windows:
        return Windows(Path(path), self.shape.context, self.options.dtype)
