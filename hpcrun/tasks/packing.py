"""Attention over packed documents: a token sees earlier tokens of the same document only.

A sample of a file of tokens is a window, which may contain the ends and beginnings of several documents.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def documents(tokens: Tensor, end: int) -> Tensor:
    """Return the number of the document of each token in its window: integer [B, T] -> integer [B, T].

    The token ``end`` is the last token of its document.
    """
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def document_mask(tokens: Tensor, end: int, *, blocks: bool | None = None) -> Any:
    """Return which earlier tokens each token sees, for :func:`attend_in_documents`.

    Args:
        tokens: integer [B, T].
        end: the token that ends a document.
        blocks: True: a BlockMask of ``torch.nn.attention.flex_attention``, with a few numbers for each
            128 x 128 tokens. False: bool [B, 1, T, T]. None: True on an accelerator. flex_attention has no
            backward pass on the CPU.
    """
    number = documents(tokens, end)
    if blocks is None:
        blocks = tokens.device.type not in ("cpu", "meta")
    if not blocks:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        same = number[:, :, None] == number[:, None, :]
        return (same & (position[:, None] >= position[None, :]))[:, None]

    def sees(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (number[batch, query] == number[batch, key])

    rows, columns = tokens.shape
    return compiled("create_block_mask")(sees, rows, None, columns, columns, tokens.device)


def attend_in_documents(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """Return attention with the ``mask`` of :func:`document_mask`: float [B, H, T, D].

    ``key`` and ``value`` may have fewer heads than ``query``: float [B, G, T, D].
    """
    shared = query.shape[1] != key.shape[1]
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=shared)
    mixed: Tensor = compiled("flex_attention")(
        query, key, value, block_mask=mask, enable_gqa=shared
    )
    return mixed


@cache
def compiled(name: str) -> Any:
    """Return a function of flex_attention, compiled: without, it computes all T x T products in memory."""
    from torch.nn.attention import flex_attention

    # Otherwise a shape could change its kernel after another shape, and not in a resumed run.
    return torch.compile(getattr(flex_attention, name), dynamic=False)
