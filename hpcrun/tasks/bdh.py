"""The Dragon Hatchling over bytes, written to be read: attention between neurons instead of heads.

BDH-GPU of Kosowski et al. 2025 (arXiv:2509.26507). A byte is a short vector; every layer excites
many neurons from it, whose values are positive and mostly zero (ReLU). Attention is linear, in the
space of the neurons: what a layer remembers is the sum over earlier positions of (neuron, value)
products, a matrix of fixed size however long the text (a fast weight, in the sense of Hebb). All
layers share one set of weights, so that depth costs time and no parameters.

With N the normalisation to mean 0 and variance 1, R the rotation by position, and v the vectors:

    x = relu(excite v)                            neurons that v excites
    a = sum over s < t of (R_t x_t . R_s x_s) v_s attention to what came strictly before, per head
    y = relu(gate N(a)) * x                       what the past lets through
    v = N(v + N(read y))

It has parameters and nothing else: no buffer that DDP would broadcast at every step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcrun.tasks.gpt import INIT_STD, VOCABULARY, rotate, rotation
from hpcrun.tasks.options import LanguageModelShape

ROTATION_BASE = 2.0**16
"""As in the authors' experiments: slower than a transformer's, for heads that are much longer."""


class BDH(nn.Module):
    """Logits of the next byte at every position: integer [B, T] -> float [B, T, 256]."""

    def __init__(self, shape: LanguageModelShape, seed: int = 0) -> None:
        """Build with weights that depend on ``shape`` and ``seed`` alone."""
        super().__init__()
        self.layers = shape.layers
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        # A list of one, so that it counts as a block where activations are recomputed, which pays:
        # a layer has many more neurons than weights would suggest.
        self.blocks = nn.ModuleList([Layer(shape)])
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


class Layer(nn.Module):
    """One pass through the neurons: float [B, T, width] -> the same."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        neurons = shape.neurons_or_default
        self.excite = nn.Linear(shape.width, neurons, bias=False)
        # Each head gates its own neurons by what it alone attended to.
        self.gate = nn.Parameter(torch.empty(self.heads, shape.width, neurons // self.heads))
        self.read = nn.Linear(neurons, shape.width, bias=False)

    def forward(self, v: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = F.relu(self.excite(v)).view(*v.shape[:2], self.heads, -1).transpose(1, 2)
        y = F.relu(normed(attended(x, v, turn)) @ self.gate) * x
        y = F.dropout(y.transpose(1, 2).flatten(2), self.dropout, self.training)
        return normed(v + normed(self.read(y)))


def normed(x: Tensor) -> Tensor:
    """Each vector with mean 0 and variance 1."""
    return F.layer_norm(x, x.shape[-1:])


def attended(x: Tensor, v: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """What each head recalls: neurons [B, heads, T, n], values [B, T, width] -> [B, heads, T, width].

    The sum over earlier positions is taken as one masked product, quadratic in T, which for samples
    shorter than a head's neurons is less work than carrying the matrix of fast weights along.
    """
    turned = rotate(x, turn)
    # The present position is left out: the first one recalls nothing.
    agreement = (turned @ turned.mT).tril(-1)
    return agreement @ v.unsqueeze(1)
