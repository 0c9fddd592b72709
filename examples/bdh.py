"""The Dragon Hatchling over bytes: attention between neurons instead of heads.

    hpcrun submit -c configs/bdh.yaml

The task is the language model of the quick start with another model. Copy the file to change it.

BDH-GPU of Kosowski et al. 2025 (arXiv:2509.26507). A byte is a short vector. In every layer it activates
many neurons, with values that are positive and mostly zero (ReLU). Attention is linear, in the space of the
neurons: a layer's memory is the sum over earlier positions of (neuron, value) products, a matrix of fixed
size for any length of text (a fast weight, in the sense of Hebb). All layers share one set of weights, so
depth costs time but no parameters.

With N the normalization to mean 0 and variance 1, R the rotation by position, and v the vectors:

    x = relu(excite v)                            neurons that v activates
    a = sum over s < t of (R_t x_t . R_s x_s) v_s attention to strictly earlier positions, per head
    y = relu(gate N(a)) * x                       neurons gated by the past
    v = N(v + N(read y))

It has no buffers, which DDP would broadcast at every step.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import AfterValidator, Field, ValidationInfo
from torch import Tensor, nn
from torch.nn import functional as F

from hpcrun.config.fields import Count
from hpcrun.config.tasks.language_model import BYTES, LanguageModelShape, splits_over_heads
from hpcrun.tasks.language_model import LanguageModel
from hpcrun.tasks.llama import INIT_STD, rotate, rotation

ROTATION_BASE = 2.0**16
"""As in the authors' experiments: slower than a transformer's rotation, because the heads are much longer."""


def _split(neurons: int | None, others: ValidationInfo) -> int | None:
    return None if neurons is None else splits_over_heads(neurons, others)


class BDHShape(LanguageModelShape):
    """The ``model`` section; ``layers`` counts the passes through the only block."""

    neurons: Annotated[Count | None, AfterValidator(_split)] = Field(
        default=None, description="Neurons per layer; null: 32 times the width."
    )

    @property
    def neurons_or_default(self) -> int:
        """Number of neurons of a layer."""
        return self.neurons or 32 * self.width


class BDHTask(LanguageModel):
    """Next-byte prediction with the Dragon Hatchling."""

    draws_weights = False
    options_of_model = BDHShape
    shape: BDHShape

    def build_model(self) -> nn.Module:
        return BDH(self.shape, seed=self.config.seed)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        # Under autocast the logits have half precision, too coarse for a mean over many bytes.
        logits = model(batch[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().long())


class BDH(nn.Module):
    """Logits of the next byte at every position: integer [B, T] -> float [B, T, 256]."""

    def __init__(self, shape: BDHShape, seed: int = 0) -> None:
        """Build with weights that depend only on ``shape`` and ``seed``."""
        super().__init__()
        self.layers = shape.layers
        self.embedding = nn.Embedding(BYTES, shape.width)
        # A list of one element, so that it counts as a block for activation checkpointing, which helps
        # here: a layer has many more activations than its weights suggest.
        self.blocks = nn.ModuleList([BDHLayer(shape)])
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.head_length = shape.neurons_or_default // shape.heads
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            nn.init.normal_(weight, std=INIT_STD, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        turn = rotation(tokens.shape[1], self.head_length, tokens.device, ROTATION_BASE)
        v = normed(self.embedding(tokens.long()))
        for _ in range(self.layers):
            v = self.blocks[0](v, turn)
        logits: Tensor = self.head(v)
        return logits


class BDHLayer(nn.Module):
    """One pass through the neurons: float [B, T, width] -> float [B, T, width]."""

    def __init__(self, shape: BDHShape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        neurons = shape.neurons_or_default
        self.excite = nn.Linear(shape.width, neurons, bias=False)
        # Each head gates its own neurons by its own attention.
        self.gate = nn.Parameter(torch.empty(self.heads, shape.width, neurons // self.heads))
        self.read = nn.Linear(neurons, shape.width, bias=False)

    def forward(self, v: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = F.relu(self.excite(v)).view(*v.shape[:2], self.heads, -1).transpose(1, 2)
        y = F.relu(normed(attended(x, v, turn)) @ self.gate) * x
        y = F.dropout(y.transpose(1, 2).flatten(2), self.dropout, self.training)
        return normed(v + normed(self.read(y)))


def normed(x: Tensor) -> Tensor:
    """Normalize each vector to mean 0 and variance 1."""
    return F.layer_norm(x, x.shape[-1:])


def attended(x: Tensor, v: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Return each head's memory: neurons [B, heads, T, n], values [B, T, width] -> [B, heads, T, width].

    The sum over earlier positions is one masked product, quadratic in T. For samples shorter than a head's
    number of neurons this is less work than updating the matrix of fast weights.
    """
    turned = rotate(x, turn)
    # Without the current position; the first position has no memory.
    agreement = (turned @ turned.mT).tril(-1)
    return agreement @ v.unsqueeze(1)
