"""A small, readable Dragon Hatchling over bytes: attention between neurons instead of heads.

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

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcrun.tasks.gpt import INIT_STD, VOCABULARY, rotate, rotation
from hpcrun.tasks.options.language_model import LanguageModelShape

ROTATION_BASE = 2.0**16
"""As in the authors' experiments: slower than a transformer's rotation, because the heads are much longer."""


class BDH(nn.Module):
    """Logits of the next byte at every position: integer [B, T] -> float [B, T, 256]."""

    def __init__(self, shape: LanguageModelShape, seed: int = 0) -> None:
        """Build with weights that depend only on ``shape`` and ``seed``."""
        super().__init__()
        self.layers = shape.layers
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        # A list of one element, so that it counts as a block for activation checkpointing, which helps
        # here: a layer has many more activations than its weights suggest.
        self.blocks = nn.ModuleList([BDHLayer(shape)])
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
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

    def __init__(self, shape: LanguageModelShape) -> None:
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
