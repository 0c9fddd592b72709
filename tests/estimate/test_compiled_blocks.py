"""The activations of compiled blocks are counted as torch.compile keeps them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.estimate.compiled_blocks import compile_blocks
from hpcrun.estimate.live_storages import LiveStorages, storages
from hpcrun.tasks.llama import Llama
from hpcrun.train.model.prepare import blocks, compile_in_place

SHAPE = LanguageModelShape(
    layers=2, heads=4, kv_heads=2, width=64, mlp_width=192, vocabulary=384, context=64
)


def tokens() -> Tensor:
    return torch.randint(0, 384, (2, 64), generator=torch.Generator().manual_seed(1))


def kept_by_torch(model: nn.Module) -> int:
    """Return the bytes that a forward pass with torch.compile keeps for the backward pass, in blocks."""
    for block in blocks(model):
        # The partitioner and the decompositions of inductor, without its compiler.
        compile_in_place(block, backend="aot_eager_decomp_partition")
    kept: dict[int, int] = {}
    packed: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        kept.update(storages([tensor]))
        return tensor

    seen = tokens()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model.model(seen)
    own = storages([*model.parameters(), hidden, seen])
    return sum(size for key, size in kept.items() if key not in own)


def kept_in_estimate(said: list[str]) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, LiveStorages(block=1) as live:
        model = Llama(SHAPE)
        live.add(model.parameters())
        compile_blocks(model, live, said.append)
        seen = mode.from_tensor(tokens())
        before = live.live
        hidden = model.model(seen)
        return live.live - before - sum(storages([hidden]).values())


def test_kept_activations_equal_those_of_torch_compile():
    said: list[str] = []
    assert kept_in_estimate(said) == kept_by_torch(Llama(SHAPE))
    assert said == []


class Branch(nn.Module):
    """A block that reads a value, at which torch.compile divides its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_contiguous() and self.inner.weight.sum() > 0:
            return self.inner(x)
        return x


def test_a_block_of_several_graphs_counts_as_eager():
    said: list[str] = []
    with FakeTensorMode() as mode, LiveStorages() as live:
        model = nn.Sequential(Branch(), Branch())
        compile_blocks(model, live, said.append)
        # The value does not exist on fake tensors, with or without compilation.
        with pytest.raises(DataDependentOutputException):
            model(mode.from_tensor(torch.ones(2, 8)))
    assert len(said) == 1
    assert "Branch is no single graph" in said[0]


def test_fused_results_do_not_count():
    peaks = []
    for compiled in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, LiveStorages(block=1) as live:
            model = Llama(SHAPE)
            live.add(model.parameters())
            if compiled:
                compile_blocks(model, live, print)
            hidden = model.model(mode.from_tensor(tokens()))
            live.start()
            hidden.sum().backward()
            peaks.append(live.peak)
    assert peaks[1] < peaks[0]
