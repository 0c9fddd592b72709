"""Blocks of a model, and their preparation for training: recomputation, compilation, layout."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.flex_attention import flex_attention
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from hpcrun.checkpoint.state.tree import named_parameters
from hpcrun.errors import UserError
from hpcrun.train.model.prepare import (
    Preparation,
    blocks,
    compile_in_place,
    keep_costly,
    prepare,
    unshared,
)
from tests.support.training.parallelism import Block, Net
from tests.support.training.small_training import loss


def names(module, parts):
    by_id = {id(part): name for name, part in module.named_modules(remove_duplicate=False)}
    return [by_id[id(part)] for part in parts]


class Encoder(nn.Module):
    """A model with lists of all kinds; only the shapes matter here."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
        self.outer = nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        self.heads = nn.ModuleDict({"one": nn.Linear(4, 11, bias=False), "two": nn.Linear(4, 2)})
        self.only = nn.ModuleList([nn.TransformerEncoderLayer(4, 2, 8)])
        self.heads["one"].weight = self.embedding.weight
        self.tables = nn.ModuleDict({"word": nn.Embedding(11, 4), "place": nn.Embedding(9, 4)})


def test_blocks_are_the_repeated_elements_of_lists():
    encoder = Encoder()
    assert names(encoder, blocks(encoder)) == [
        "layers.0", "layers.1", "layers.2", "outer.1.0", "outer.1.1", "heads.one", "heads.two", "only.0",
    ]  # fmt: skip


def test_weights_that_are_used_elsewhere_stay_in_the_root_unit():
    encoder = Encoder()
    parts = unshared(encoder, blocks(encoder))
    assert "heads.one" not in names(encoder, parts)
    assert "heads.two" in names(encoder, parts)


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_recomputing_changes_no_bit_with_dropout_and_less_is_kept(checkpointing):
    def step(wanted):
        torch.manual_seed(0)
        net = Net(dropout=0.3)
        prepare(net, wanted)
        saved = []
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda value: saved.append(value.numel()) or value, lambda value: value
        ):
            value = loss(net, (torch.randn(64, 6), torch.randn(64)))
        value.backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()]), sum(saved)

    plain, all_kept = step(Preparation())
    again, kept = step(Preparation(checkpointing))
    assert torch.equal(plain, again)
    assert kept < all_kept


class Products(TorchDispatchMode):
    """Counts the computed matrix products."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*arguments, **(options or {}))


def test_selective_checkpointing_computes_no_matrix_product_twice():
    def products(wanted):
        torch.manual_seed(0)
        net = Net()
        prepare(net, wanted)
        with Products() as counted:
            loss(net, (torch.randn(8, 6), torch.randn(8))).backward()
        return counted.count

    assert products(Preparation("selective")) == products(Preparation())
    assert products(Preparation("full")) > products(Preparation())


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def attention(x: torch.Tensor) -> torch.Tensor:
    """Stand in for attention of another library."""
    return x.clone()


def test_selective_checkpointing_keeps_attention_and_scaled_products():
    scaled = torch.ops.aten._scaled_mm
    other = torch.ops.flash_attn._flash_attn_forward
    for operation in (flex_attention, scaled.default, other.default):
        assert keep_costly(None, operation) is CheckpointPolicy.MUST_SAVE
    assert keep_costly(None, torch.ops.aten.tanh.default) is CheckpointPolicy.PREFER_RECOMPUTE


def test_names_in_a_checkpoint_do_not_show_recomputation():
    net = Net()
    plain = list(net.state_dict())
    prepare(net, Preparation("full"))
    assert list(net.state_dict()) == plain
    assert [name for name, _ in named_parameters(net)] == [
        name for name, _ in Net().named_parameters()
    ]


def test_a_model_without_blocks_has_nothing_to_checkpoint():
    with pytest.raises(UserError, match=r"train.activation_checkpointing: Linear has no blocks"):
        prepare(nn.Linear(3, 3), Preparation("full"))


def test_a_block_with_running_statistics_is_not_recomputed():
    norm = nn.BatchNorm1d(3)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), norm) for _ in range(2)))
    for mode in (True, False):
        with pytest.raises(
            UserError, match=r"BatchNorm1d in a block would update its running stat"
        ):
            prepare(net.train(mode), Preparation("full"))
    net.train()
    norm.eval()
    prepare(net, Preparation("full"))


def graphs_of(begin):
    """Return the number of compiled graphs when ``begin(compiler)`` gives a module and it is trained."""
    torch._dynamo.reset()
    given = []

    def compiler(graph, _inputs):
        given.append(graph)
        return graph.forward

    module = begin(compiler)
    module(torch.ones(2, 6)).sum().backward()
    return len(given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Block(6, 0.0),
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
        lambda: nn.Linear(6, 6),
        lambda: checkpoint_wrapper(nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
    ],
)
def test_every_kind_of_block_is_compiled_and_keeps_its_names(make):
    part = make()
    plain = list(part.state_dict())

    def begin(compiler):
        compile_in_place(part, backend=compiler)
        return part

    assert graphs_of(begin) == 1
    assert list(part.state_dict()) == plain


def test_more_blocks_than_the_cache_limit_are_compiled():
    parts = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(12)))

    def begin(compiler):
        for part in parts:
            compile_in_place(part, backend=compiler)
        return parts

    assert graphs_of(begin) == 12
