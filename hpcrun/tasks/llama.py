"""A language model with the architecture of Llama, over bytes or over the tokens of a tokenizer.

Sources: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024, arXiv:2407.21783. Blocks have RMSNorm
before each branch (Zhang, Sennrich 2019, arXiv:1910.07467), rotary positions (Su et al. 2021,
arXiv:2104.09864), SwiGLU (Shazeer 2020, arXiv:2002.05202) and grouped-query attention (Ainslie et al. 2023,
arXiv:2305.13245). Residual branches start smaller in deeper models (Radford et al. 2019, GPT-2).

Modules and parameters have the names of ``transformers.LlamaForCausalLM``, so its files fit as they are. The
model has no buffers, which DDP would broadcast at every step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from hpcrun.config.tasks.language_model import LanguageModelShape, RopeScaling
from hpcrun.tasks.chunked_loss import linear_cross_entropy
from hpcrun.tasks.packing import attend_in_documents, document_mask
from hpcrun.train.model.counter_draws import draw_normal

INIT_STD = 0.02


class Llama(nn.Module):
    """Logits of the next token at every position: integer [B, T] -> float [B, T, rows].

    ``rows`` is the vocabulary, rounded up to a multiple of 128, with which tensor cores are fastest. No token
    has the number of an additional row.
    """

    def __init__(self, shape: LanguageModelShape, seed: int = 0) -> None:
        """Build with weights that depend only on the arguments."""
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = Head(shape.width, shape.rows, bias=False)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.seed = seed
        self.draw_weights()

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or with ``targets`` [B, T] the mean cross-entropy in nats, float32 []."""
        loss: Tensor = self.lm_head(self.model(tokens), targets)
        return loss

    @torch.no_grad()
    def draw_weights(self) -> None:
        """Set the weights, or this rank's shards, to values that depend on seed, name and index only."""
        for wrapped, weight in self.named_parameters():
            name = wrapped.replace("_checkpoint_wrapped_module.", "")
            if weight.ndim > 1:
                draw_normal(weight, initial_std(name, self.shape.layers), seed=self.seed, name=name)
            else:
                weight.fill_(1.0)


def initial_std(name: str, layers: int) -> float:
    """Return the standard deviation with which the matrix ``name`` starts."""
    # The residual stream sums 2 * layers branches; this keeps the variance of the sum constant.
    branch_end = name.endswith(("o_proj.weight", "down_proj.weight"))
    return INIT_STD / math.sqrt(2 * layers) if branch_end else INIT_STD


class Decoder(nn.Module):
    """Embedding, blocks and the last norm: integer [B, T] -> float [B, T, width]."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.rows, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        shape = self.shape
        mask = None
        # On fake tensors without a mask: causal attention keeps what flex_attention keeps on a GPU.
        if shape.document_end is not None and not isinstance(tokens, FakeTensor):
            mask = document_mask(tokens, shape.document_end)
        x = F.dropout(self.embed_tokens(tokens), shape.dropout, self.training)
        angles = rotation(
            tokens.shape[1], shape.head_width, x.device, shape.rope_base, shape.rope_scaling
        )
        # Here, because FSDP would convert them for each block.
        angles = angles[0].to(x.dtype), angles[1].to(x.dtype)
        for layer in self.layers:
            x = layer(x, angles, mask)
        last: Tensor = self.norm(x)
        return last


class Head(nn.Linear):
    """The output product, and its loss in chunks.

    The loss is computed here and not by the task, because FSDP gathers the weight only for this call.
    """

    def forward(self, input: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, or with ``targets`` [B, T] the mean cross-entropy in nats, float32 []."""
        if targets is None:
            return super().forward(input)
        loss: Tensor = linear_cross_entropy(
            input.flatten(0, 1), self.weight, targets.flatten().long()
        )
        return loss


class Block(nn.Module):
    """Attention, then a gated MLP, each with a residual connection: float [B, T, width]."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.mlp = GatedMLP(shape.width, shape.inner_width)
        self.dropout = shape.dropout

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), angles, mask)
        x = x + F.dropout(mixed, self.dropout, self.training)
        thought = self.mlp(self.post_attention_layernorm(x))
        return x + F.dropout(thought, self.dropout, self.training)


class Attention(nn.Module):
    """Causal attention; several query heads share a head of keys and values: float [B, T, width]."""

    def __init__(self, shape: LanguageModelShape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.shared = shape.heads != shape.key_value_heads
        of_keys = shape.key_value_heads * shape.head_width
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, of_keys, bias=False)
        self.v_proj = nn.Linear(shape.width, of_keys, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Any) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_width)
        query, key, value = (
            project(x).view(heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, angles), rotate(key, angles)
        if mask is None:
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=self.shared
            )
        else:
            mixed = attend_in_documents(query, key, value, mask)
        result: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return result


class GatedMLP(nn.Module):
    """Two products, the first with a SiLU, multiply; a third returns to the width: float [B, T, width]."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


def rotation(
    length: int,
    head_width: int,
    device: torch.device,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position's angles, each float32 [length, head_width / 2].

    Pair j turns by position / base^(2j / head_width), as in RoFormer. Computing them in each forward pass is
    cheap, and needs neither a buffer nor a limit on the length. Attention depends on differences of positions
    only, so positions need not restart at the beginning of a document. ``scaling``: Llama 3.1, as in
    ``transformers.modeling_rope_utils``.
    """
    pairs = torch.arange(0, head_width, 2, device=device, dtype=torch.float32)
    frequency = torch.exp(pairs * (-math.log(base) / head_width))
    if scaling is not None:
        # From 0 for pairs with few turns in the original context, to 1 for pairs that stay as they are.
        turns = frequency * (scaling.original_max_position_embeddings / (2 * math.pi))
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (j, j + half) of ``x`` [..., T, head_width] by its position's angle."""
    cos, sin = (part.to(x.dtype) for part in angles)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, count: int, *, context: int, temperature: float, seed: int
) -> bytes:
    """Return ``prompt`` continued by ``count`` bytes sampled from a model of bytes.

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
