"""The model is the GPT that it claims to be: causal, relative positions, tied weights, reproducible."""

import math

import pytest
import torch
from torch.nn import functional as F

from hpcrun.tasks.gpt import GPT, generate, rotate, rotation
from hpcrun.tasks.options import LanguageModelShape

SHAPE = LanguageModelShape(layers=2, heads=2, width=32, context=24)


def tokens(count: int = 3, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(1))


def test_the_order_of_the_bytes_before_matters():
    # Attention without positions does not see this in a single block.
    model, seen = GPT(SHAPE.model_copy(update={"layers": 1})).eval(), tokens(1)
    swapped = seen.clone()
    swapped[:, [2, 5]] = seen[:, [5, 2]]
    assert not torch.allclose(model(seen)[:, -1], model(swapped)[:, -1])


def test_attention_scores_depend_only_on_the_distance():
    generator = torch.Generator().manual_seed(2)
    query, key = torch.randn(2, 8, generator=generator)
    turn = rotation(20, 8, torch.device("cpu"))
    queries, keys = (rotate(x.expand(20, 8), turn) for x in (query, key))
    scores = queries @ keys.T
    torch.testing.assert_close(scores[5, 2], scores[17, 14])
    torch.testing.assert_close(scores[0, 9], scores[10, 19])
    assert not torch.allclose(scores[5, 2], scores[5, 3])


def test_the_forward_pass_is_the_formula_written_out():
    shape = LanguageModelShape(layers=1, heads=2, width=8, context=5)
    model, seen = GPT(shape, seed=4), tokens(1, 5)
    block = model.blocks[0]
    x = model.embedding.weight[seen[0]]
    mixed = []
    qkv = F.layer_norm(x, (8,), block.attention_norm.weight) @ block.attend.weight.T
    for head in range(2):
        q, k, v = (qkv[:, 8 * part + 4 * head : 8 * part + 4 * head + 4] for part in range(3))
        turn = rotation(5, 4, torch.device("cpu"))
        scores = rotate(q, turn) @ rotate(k, turn).T / math.sqrt(4)
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        mixed.append(scores.softmax(-1) @ v)
    x = x + torch.cat(mixed, -1) @ block.project.weight.T
    wide = F.gelu(F.layer_norm(x, (8,), block.mlp_norm.weight) @ block.widen.weight.T)
    x = x + wide @ block.shrink.weight.T
    logits = F.layer_norm(x, (8,), model.norm.weight) @ model.embedding.weight.T
    torch.testing.assert_close(model(seen)[0], logits)


def test_embedding_and_output_share_one_matrix():
    model = GPT(SHAPE)
    assert sum(p.shape == (256, 32) for p in model.parameters()) == 1
    assert not list(model.buffers())
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


def test_branches_start_smaller_in_a_deeper_model():
    for layers in (1, 4):
        model = GPT(LanguageModelShape(layers=layers, heads=2, width=128))
        assert model.blocks[0].project.weight.std().item() == pytest.approx(
            0.02 / math.sqrt(2 * layers), rel=0.05
        )
        assert model.blocks[0].widen.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_generated_text_depends_on_prompt_and_seed():
    model = GPT(SHAPE)

    def text(seed: int) -> bytes:
        return generate(model, b"def ", 40, context=24, temperature=1.0, seed=seed)

    assert text(0).startswith(b"def ")
    assert len(text(0)) == 44
    assert text(0) == text(0) != text(1)


def test_generating_keeps_the_random_state_and_the_mode():
    model = GPT(SHAPE.model_copy(update={"dropout": 0.5})).train()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    generate(model, b"a", 5, context=24, temperature=1.0, seed=0)
    assert torch.equal(torch.rand(4), expected)
    assert model.training
