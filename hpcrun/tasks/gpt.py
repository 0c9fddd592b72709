"""A small, readable GPT over bytes, or over other tokens.

Pre-norm blocks (Xiong et al. 2020, arXiv:2002.04745), rotary positions (Su et al. 2021, arXiv:2104.09864),
one matrix for embedding and output (Press and Wolf 2017, arXiv:1608.05859), and residual branches that
start smaller in deeper models (Radford et al. 2019, GPT-2). It has no buffers, which DDP would broadcast at
every step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcrun.tasks.options import LanguageModelShape

VOCABULARY = 256
"""One token per byte value: no tokenizer to train, download or version."""

INIT_STD = 0.02


class GPT(nn.Module):
    """Logits of the next byte or token at every position: integer [B, T] -> float [B, T, vocabulary]."""

    def __init__(
        self,
        shape: LanguageModelShape,
        seed: int = 0,
        vocabulary: int = VOCABULARY,
    ) -> None:
        """Build with weights that depend only on the arguments."""
        super().__init__()
        self.head_length = shape.width // shape.heads
        self.embedding = nn.Embedding(vocabulary, shape.width)
        self.dropout = shape.dropout
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self._initialize(shape.layers, torch.Generator().manual_seed(seed))

    def forward(self, tokens: Tensor) -> Tensor:
        turn = rotation(tokens.shape[1], self.head_length, tokens.device)
        x = F.dropout(self.embedding(tokens.long()), self.dropout, self.training)
        for block in self.blocks:
            x = block(x, turn)
        return F.linear(self.norm(x), self.embedding.weight)

    def _initialize(self, layers: int, generator: torch.Generator) -> None:
        for name, weight in self.named_parameters():
            if weight.ndim < 2:
                continue
            # The residual stream sums 2 * layers branches; this keeps the variance of the sum constant.
            branch_end = name.endswith((".project.weight", ".shrink.weight"))
            std = INIT_STD / math.sqrt(2 * layers) if branch_end else INIT_STD
            nn.init.normal_(weight, std=std, generator=generator)


class Block(nn.Module):
    """Attention, then a two-layer MLP, each with a residual connection: float [B, T, width]."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.attend = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.project = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.widen = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.shrink = nn.Linear(4 * shape.width, shape.width, bias=False)
        self.dropout = shape.dropout

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        seen = self.project(self._attention(self.attention_norm(x), turn))
        x = x + F.dropout(seen, self.dropout, self.training)
        thought: Tensor = self.shrink(F.gelu(self.widen(self.mlp_norm(x))))
        return x + F.dropout(thought, self.dropout, self.training)

    def _attention(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, width = x.shape
        split = self.attend(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key = rotate(split[:2], turn).unbind()
        mixed = F.scaled_dot_product_attention(query, key, split[2], is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


def rotation(
    length: int, head_length: int, device: torch.device, base: float = 10000.0
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, each float32 [length, head_length / 2].

    Pair j turns by position / base^(2j / head_length), as in RoFormer. Computing them in each forward pass is
    cheap, and needs neither a buffer nor a limit on the length.
    """
    pairs = torch.arange(0, head_length, 2, device=device, dtype=torch.float32)
    frequency = torch.exp(pairs * (-math.log(base) / head_length))
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (j, j + half) of ``x`` [..., T, head_length] by its position's angle."""
    cos, sin = (part.to(x.dtype) for part in turn)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, count: int, *, context: int, temperature: float, seed: int
) -> bytes:
    """Return ``prompt`` continued by ``count`` bytes sampled from the model.

    A separate generator on the CPU makes the draws: the same model and ``seed`` give the same text, and the
    global random state, which resumed trainings depend on, does not change. The model sees the last
    ``context`` bytes; its mode (train or eval) is restored.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        text = bytearray(prompt)
        for _ in range(count):
            seen = torch.tensor([list(text[-context:])], device=device)
            logits = model(seen)[0, -1].float().cpu()
            chances = torch.softmax(logits / temperature, dim=-1)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
    finally:
        model.train(training)
    return bytes(text)
