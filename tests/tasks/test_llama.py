"""The model is the Llama that it claims to be: packed, with a fused loss."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.tasks.chunked_loss import linear_cross_entropy
from hpcrun.tasks.llama import Llama, generate
from hpcrun.tasks.packing import attend_in_documents, compiled, document_mask, documents

SHAPE = LanguageModelShape(layers=2, heads=2, width=32, context=24)
END = 7


def tokens(count: int = 3, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(1))


def test_a_vocabulary_is_rounded_up_to_full_tiles():
    model = Llama(SHAPE.model_copy(update={"vocabulary": 300}))
    assert model(tokens(1)).shape == (1, 24, 384)


def test_branches_start_smaller_in_a_deeper_model():
    for layers in (1, 4):
        layer = Llama(LanguageModelShape(layers=layers, heads=2, width=128)).model.layers[0]
        scaled = pytest.approx(0.02 / math.sqrt(2 * layers), rel=0.05)
        assert layer.self_attn.o_proj.weight.std().item() == scaled
        assert layer.mlp.down_proj.weight.std().item() == scaled
        assert layer.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)


def in_documents(model: nn.Module, seen: torch.Tensor) -> list[torch.Tensor]:
    """Return the logits of each document of the only sample, computed alone."""
    number = documents(seen, END)[0]
    return [model(seen[:, number == n]) for n in number.unique()]


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_packed_documents_give_the_logits_of_each_alone(kv_heads: int):
    shape = SHAPE.model_copy(update={"document_end": END, "kv_heads": kv_heads})
    model, seen = Llama(shape, seed=1), tokens(1)
    seen[0, [4, 11]] = END
    together = model(seen)
    torch.testing.assert_close(together[0], torch.cat(in_documents(model, seen), 1)[0])
    alone = sum(logits.square().sum() for logits in in_documents(model, seen))
    weights = list(model.parameters())
    expected = torch.autograd.grad(alone, weights)
    torch.testing.assert_close(torch.autograd.grad(together.square().sum(), weights), expected)


def test_the_block_mask_means_the_same_as_the_mask(monkeypatch: pytest.MonkeyPatch):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    # The block mask is for accelerators, and needs the compiler there.
    monkeypatch.setattr("hpcrun.tasks.packing.compiled", lambda name: getattr(flex, name))
    seen = tokens(2, 256)
    seen[0, [100, 130, 131]], seen[1, [5]] = END, END
    query, key, value = (
        torch.randn(2, heads, 256, 8, generator=torch.Generator().manual_seed(heads))
        for heads in (4, 2, 2)
    )
    masks = [document_mask(seen, END, blocks=blocks) for blocks in (True, False)]
    assert [isinstance(mask, torch.Tensor) for mask in masks] == [False, True]
    # torch refuses the backward pass of flex_attention on the CPU.
    flexible, dense = (attend_in_documents(query, key, value, mask) for mask in masks)
    torch.testing.assert_close(flexible, dense, rtol=1e-4, atol=1e-5)


def test_other_batch_sizes_leave_a_shape_its_kernel(monkeypatch: pytest.MonkeyPatch):
    ran: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]):
        number = len(graphs)
        graphs.append(number)
        return lambda *given: (ran.append(number), graph.forward(*given))[1]

    graphs: list[int] = []
    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **how: compile_with(function, backend=backend, **how)
    )
    compiled.cache_clear()
    used = []
    with torch.no_grad():
        for rows in (4, 3, 4):
            ran.clear()
            mask = document_mask(tokens(rows, 256), END, blocks=True)
            query = torch.ones(rows, 2, 256, 16)
            attend_in_documents(query, query, query, mask)
            used.append(list(ran))
    compiled.cache_clear()
    assert used[0] == used[2] != used[1]


@pytest.mark.parametrize("tokens_of_chunk", [None, 5])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16])
def test_the_chunked_loss_equals_the_plain_loss(
    tokens_of_chunk: int | None, precision: torch.dtype
):
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(64, 32, generator=generator, requires_grad=True)
    weight = torch.randn(1024, 32, generator=generator, requires_grad=True)
    classes = torch.randint(0, 1024, (64,), generator=generator)
    # As a gradient scaler does, in a range where float16 needs it.
    scale = 1024.0
    results = []
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        for chunked in (True, False):
            if chunked:
                loss = linear_cross_entropy(states, weight, classes, tokens_of_chunk)
                assert loss.dtype == torch.float32
            else:
                loss = F.cross_entropy(F.linear(states, weight).float(), classes)
            results.append((loss, *torch.autograd.grad(scale * loss, (states, weight))))
    fine = precision == torch.float32
    coarse = {"rtol": 1e-4, "atol": 1e-3} if fine else {"rtol": 0.05, "atol": 0.2}
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=0.0)
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(one, other, **coarse)
    # The norms agree far better than each number.
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.norm(), other.norm(), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("frozen", ["states", "weight"])
def test_the_chunked_loss_computes_no_gradient_without_need(frozen: str):
    given = {"states": torch.randn(6, 4), "weight": torch.randn(9, 4)}
    for name, value in given.items():
        value.requires_grad_(name != frozen)
    linear_cross_entropy(given["states"], given["weight"], torch.arange(6), 4).backward()
    assert [name for name, value in given.items() if value.grad is None] == [frozen]


def test_generated_text_depends_on_prompt_and_seed():
    model = Llama(SHAPE)

    def text(seed: int) -> bytes:
        return generate(model, b"def ", 40, context=24, temperature=1.0, seed=seed)

    assert text(0).startswith(b"def ")
    assert len(text(0)) == 44
    assert text(0) == text(0) != text(1)
