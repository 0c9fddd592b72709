"""Models that are sharded over gloo ranks: collectives, meshes, norms, optimizers, compilers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hpcrun.errors import NotTrainable
from hpcrun.train.optimizer import build_optimizer
from hpcrun.train.parallel.fsdp import mesh_over
from tests.support.on_ranks import ranks
from tests.support.training.parallelism import Block, Net, Way, batches, flat, trainer
from tests.support.training.small_training import config, loss


class Collectives(TorchDispatchMode):
    """Counts gathers and reductions, under any name of the torch functions that start them."""

    def __init__(self):
        super().__init__()
        self.gathers = self.reductions = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.name()
        self.gathers += name.startswith("c10d::") and "allgather" in name
        self.reductions += name.startswith("c10d::") and "reduce_scatter" in name
        return function(*arguments, **(options or {}))


# Gathers and reductions: the root and two blocks, the blocks again for the backward pass.
@pytest.mark.parametrize(
    ("reshard", "accumulation", "gathers"),
    [(True, 1, 5), (True, 4, 20), (False, 1, 3), (False, 4, 3)],
)
@ranks(2)
def test_gradients_and_kept_weights_are_communicated_once_per_step(
    rank, reshard, accumulation, gathers
):
    way = Way("fsdp", 2, accumulation=accumulation, reshard=reshard)
    made = trainer(way, rank)
    first, second = batches(way, rank, 0, 2)
    made.training_step(first, loss)
    with Collectives() as counted:
        made.training_step(second, loss)
    assert (counted.gathers, counted.reductions) == (gathers, 3)


@ranks(4)
def test_a_two_dimensional_mesh_reduces_over_rows_and_columns(rank):
    mesh = mesh_over(torch.tensor([[0, 2], [1, 3]]), ("copies", "shard"), "cpu", "cpu:gloo")
    row, column = (dist.get_process_group_ranks(mesh.get_group(n)) for n in ("shard", "copies"))
    assert row == ([0, 2] if rank in (0, 2) else [1, 3])
    assert column == ([0, 1] if rank in (0, 1) else [2, 3])
    assert mesh_over(torch.arange(4), ("shard",), "cpu", "cpu:gloo").size() == 4
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    fully_shard(model, mesh=mesh)
    model(torch.full((2, 6), float(rank))).sum().backward()
    # Two samples of a rank's number, averaged over the numbers 0 to 3.
    assert model.weight.grad.full_tensor().unique().tolist() == [3.0]


class Normed(nn.Module):
    """A model of norms with running statistics: one at the top, two in blocks."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Linear(13, 1)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(13, 13), nn.BatchNorm1d(13), nn.Tanh()) for _ in range(2))
        )

    def forward(self, x):
        return self.leave(self.blocks(self.norm(self.enter(x))))


@ranks(2)
def test_norms_with_running_statistics_are_the_same_in_half_precision(rank):
    def losses(way):
        made = trainer(way, rank, make=Normed)
        return [made.training_step(step, loss).loss.item() for step in batches(way, rank, 0, 4)]

    copies = losses(Way("ddp", 2, "bf16"))
    assert losses(Way("fsdp", 2, "bf16")) == pytest.approx(copies, rel=0.02)


class Mixes(Net):
    """A model that multiplies a tensor in full precision, which autocast would convert."""

    def forward(self, x):
        return self.leave(self.enter(x).float())


@ranks(2)
def test_half_precision_needs_no_autocast_and_refuses_a_mixture(rank):
    made = trainer(Way("fsdp", 2, "bf16"), rank)
    x = batches(Way("fsdp", 2), rank, 0, 1)[0][0][0]
    assert made.autocast() is trainer(Way("fsdp", 2), rank).autocast()
    # A loss outside of the model is computed in full precision, as with autocast.
    assert made.model(x).dtype == torch.float32
    made.after_evaluation()
    made = trainer(Way("fsdp", 2, "bf16"), rank, make=Mixes)
    with pytest.raises(
        NotTrainable, match=r"fsdp computes in bf16, but .*; convert .* for autocast"
    ):
        made.training_step(batches(Way("fsdp", 2), rank, 0, 1)[0], loss)


@pytest.mark.parametrize(
    ("name", "momentum"),
    [("adamw", 0.9), ("adam", 0.9), ("sgd", 0.9), ("sgd", 0.0)],
)
@ranks(2)
def test_every_optimizer_takes_the_same_steps_sharded(rank, name, momentum):
    asked = config(f"optim.name={name}", "train.lr=0.01", f"optim.momentum={momentum}")

    def weights(way):
        made = trainer(way, rank, build=lambda model: build_optimizer(model, asked))
        for step in batches(way, rank, 0, 3):
            made.training_step(step, loss)
        return made.whole_module()

    copies = weights(Way("ddp", 2))
    for way in (Way("fsdp", 2), Way("fsdp", 2, shard="hybrid")):
        sharded = weights(way)
        if rank == 0:
            torch.testing.assert_close(flat(sharded), flat(copies), rtol=0.0, atol=5e-6)


@ranks(2)
def test_muon_computes_each_matrix_on_one_rank(rank):
    def stepped(way):
        made = trainer(way, rank)
        for number, parameter in enumerate(made.module.parameters()):
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        with FlopCounterMode(display=False) as counted:
            made.optimizer.step()
        return counted.get_total_flops(), made.whole_module()

    alone, copies = stepped(Way("ddp", 2, optimizer="muon"))
    for shard in ("full", "hybrid"):
        each, sharded = stepped(Way("fsdp", 2, shard=shard, optimizer="muon"))
        assert each == (alone / 2 if shard == "full" else alone)  # A node has one rank.
        if rank == 0:
            torch.testing.assert_close(flat(sharded), flat(copies))


class Deep(Net):
    """A model with six blocks."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.blocks = nn.ModuleList(Block(13, dropout) for _ in range(6))


@ranks(2)
def test_ddp_compiles_equal_blocks_into_one_graph(rank, monkeypatch):
    graphs, compiled = [], nn.Module.compile

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, "compile", lambda part, **_: compiled(part, backend=counting))
    way = Way("ddp", 2, compiled=True)
    made = trainer(way, rank, make=Deep)
    for step in batches(way, rank, 0, 2):
        made.training_step(step, loss)
    assert len(graphs) == 1


@ranks(2)
def test_a_trainer_refuses_invalid_combinations(rank):
    with pytest.raises(ValueError, match="parallel=single works in one process only"):
        trainer(Way("single", 2), rank)
    with pytest.raises(ValueError, match="give a function that makes it"):
        trainer(Way("fsdp", 2), rank, optimizer=torch.optim.SGD)
