"""The model is the Dragon Hatchling: recurrent form, causal, weights shared by layers."""

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from examples.bdh import BDH, ROTATION_BASE, BDHShape, attended
from hpcrun.tasks.llama import generate, rotate, rotation

SHAPE = BDHShape(layers=2, heads=2, width=16, context=12, neurons=64)


def tokens(count: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(1))


def test_the_forward_pass_equals_the_recurrence_over_fast_weights():
    """Compute position after position, with the matrix that the paper calls state for each layer and head."""
    model, seen = BDH(SHAPE, seed=4).double(), tokens(1)[0]
    (layer_of_all,) = model.blocks
    layers, heads, share = 2, 2, 32
    cos, sin = (part.double() for part in rotation(12, share, seen.device, ROTATION_BASE))
    memory = torch.zeros(layers, heads, share, 16, dtype=torch.double)
    rows = []
    for position, token in enumerate(seen):
        turn = cos[position : position + 1], sin[position : position + 1]
        v = F.layer_norm(model.embedding.weight[token], (16,))
        for layer in range(layers):
            x = (layer_of_all.excite.weight @ v).clamp(min=0).view(heads, share)
            y = torch.empty(heads, share, dtype=torch.double)
            for head in range(heads):
                turned = rotate(x[head : head + 1], turn)[0]
                recalled = F.layer_norm(turned @ memory[layer, head], (16,))
                y[head] = (recalled @ layer_of_all.gate[head]).clamp(min=0) * x[head]
                memory[layer, head] += torch.outer(turned, v)
            v = F.layer_norm(v + F.layer_norm(layer_of_all.read.weight @ y.flatten(), (16,)), (16,))
        rows.append(model.head.weight @ v)
    torch.testing.assert_close(model(seen[None])[0], torch.stack(rows), rtol=1e-5, atol=1e-6)


def test_a_position_recalls_what_came_before_it_and_never_itself():
    x, v = torch.rand(1, 1, 3, 4), torch.randn(1, 3, 5)
    recalled = attended(x, v, rotation(3, 4, x.device))[0, 0]
    assert torch.equal(recalled[0], torch.zeros(5))
    # Anything that the second position recalls is a multiple of the only value before it.
    assert torch.allclose(recalled[1] / v[0, 0], (recalled[1] / v[0, 0]).mean())


@pytest.mark.parametrize("layers", [1, 3])
def test_every_weight_gets_a_gradient(layers: int):
    model = BDH(SHAPE.model_copy(update={"layers": layers}))
    model(tokens()).square().mean().backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())


def test_neurons_that_do_not_divide_among_the_heads_are_refused():
    with pytest.raises(ValidationError, match="nearest: 64 or 72"):
        BDHShape(heads=4, neurons=70)


def test_it_writes_a_sample():
    text = generate(BDH(SHAPE), b"def ", 20, context=12, temperature=1.0, seed=0)
    assert text.startswith(b"def ")
    assert len(text) == 24
