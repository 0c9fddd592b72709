"""Scenarios besides training: validation, counts of collectives, refusals. Run by ``equivalence``."""

import contextlib
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrun.config import override_layer, resolve
from hpcrun.errors import UserError
from hpcrun.train.evaluation.validate import validate
from hpcrun.train.evaluation.validation_data import ValidationData
from hpcrun.train.optim.optimizer import build_optimizer
from hpcrun.train.parallel.fsdp import mesh_over
from tests.train.borrowing_scenarios import a_use_that_is_found_in_the_step, the_shipped_gpt_by_size
from tests.train.sharing import Net, Pairs, Way, batches, flat, loss, trainer
from tests.train.thawing_scenarios import thawed_in_the_loop, unfreezing_when_sharded


class Mean:
    """A task with the methods that validation needs."""

    def loss(self, model, batch):
        return loss(model, batch)

    def weight(self, batch):
        return None


def validation_when_sharded(rank):
    """Validate fifty samples, seven and two on four ranks, and compare with the whole model."""
    way = Way("fsdp", 4)
    made = trainer(way, rank)
    group = made.control_group()
    for step in batches(way, rank, 0, 2):
        made.training_step(step, loss)
    found = {}

    def over_ranks(size):
        chosen = ValidationData(
            Pairs(size), rank=rank, world_size=4, batch_size=8, accumulation=2, limit=None,
            same_count=made.forward_is_collective,
        )  # fmt: skip
        return validate(made, Mean(), chosen, group=group)

    def compare(size):
        value = over_ranks(size)
        whole = made.whole_module()
        if whole is None:
            return [value, value]
        data = Pairs(size)
        inputs, targets = zip(*(data[index] for index in range(size)), strict=True)
        with torch.no_grad():
            whole.eval()
            return [value, loss(whole, (torch.stack(inputs), torch.stack(targets))).item()]

    for size in (50, 7, 2):
        found[str(size)] = compare(size)
    # Weights gathered for one validation must not remain for the next.
    over_ranks(2)
    with torch.no_grad():
        for parameter in made.module.parameters():
            parameter.mul_(0.5)
    found["other weights"] = compare(50)
    before = made.whole_module()
    made.training_step(next(iter(batches(way, rank, 2, 3))), loss)
    after = made.whole_module()
    found["goes on"] = before is None or flat(before) != flat(after)
    return found


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


def communication_when_sharded(rank):
    """Return the number of collectives of a step with one micro-batch and with four."""
    found = {}
    for reshard in (True, False):
        for accumulation in (1, 4):
            way = Way("fsdp", 4, accumulation=accumulation, reshard=reshard)
            made = trainer(way, rank)
            first, second = batches(way, rank, 0, 2)
            made.training_step(first, loss)
            with Collectives() as counted:
                made.training_step(second, loss)
            found[f"{reshard} {accumulation}"] = [counted.gathers, counted.reductions]
    return found


def a_mesh_of_its_own_groups(rank):
    """Return the ranks of this rank's row and column, and the gradient of a model sharded over this mesh."""
    mesh = mesh_over(torch.tensor([[0, 2], [1, 3]]), ("copies", "shard"), "cpu", "cpu:gloo")
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    fully_shard(model, mesh=mesh)
    model(torch.full((2, 6), float(rank))).sum().backward()
    return {
        "row": dist.get_process_group_ranks(mesh.get_group("shard")),
        "column": dist.get_process_group_ranks(mesh.get_group("copies")),
        "flat": mesh_over(torch.arange(4), ("shard",), "cpu", "cpu:gloo").size(),
        "gradient": model.weight.grad.full_tensor().unique().tolist(),
    }


def offloading_from_the_cpu(rank):
    """Return the message if there is nothing to offload, and if the model trains."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        made = trainer(Way("fsdp", 2), rank, offload=True)
    result = made.training_step(next(iter(batches(Way("fsdp", 2), rank, 0, 1))), loss)
    return [said.getvalue(), bool(result.loss.isfinite())]


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


def running_statistics_in_bf16(rank):
    """Return the losses of DDP, and of FSDP with norms inside a block and norms as separate units."""
    found = []
    for way in (
        Way("ddp", 2, "bf16"),
        Way("fsdp", 2, "bf16"),
        Way("fsdp", 2, "bf16", wrap="classes"),
    ):
        made = trainer(way, rank, make=Normed, classes=["BatchNorm1d"])
        found.append(
            [made.training_step(step, loss).loss.item() for step in batches(way, rank, 0, 4)]
        )
    return found


class HalfUsed(Net):
    """A model with two layers that its output does not use: one never, one only on rank 1."""

    def __init__(self, dropout=0.0, *, idle_on=()):
        super().__init__(dropout)
        self.spare = nn.Linear(13, 13)
        self.idle = dist.get_rank() in idle_on

    def forward(self, x):
        return (
            super().forward(x)
            if self.idle
            else super().forward(x) + self.spare(x.new_ones(13)).mean()
        )


def unused_parameters(rank):
    found = []
    for idle_on in ((0, 1), (1,)):
        way = Way("ddp", 2)
        made = trainer(
            way, rank, make=lambda dropout, idle=idle_on: HalfUsed(dropout, idle_on=idle)
        )
        try:
            made.training_step(next(iter(batches(way, rank, 0, 1))), loss)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


class Choosy(Net):
    """A model: its used parts depend on the pass and the rank: ``choose(pass, rank)`` names unused parts."""

    def __init__(self, choose):
        super().__init__()
        self.spare, self.choose = nn.Linear(13, 13), choose

    def forward(self, x):
        left_out = self.choose(int(self.passes), dist.get_rank())
        self.passes += 1
        x = self.enter(x)
        x = x.detach() if left_out == "what is given" else x
        for block in self.blocks if left_out != "last block" else self.blocks[:-1]:
            before, x = x, block(x)
        x = before if left_out == "its result" else x
        return self.leave(x if left_out == "parameters" else x + self.spare(x))


class Adapted(Choosy):
    """Blocks that are partly frozen, and that some ranks skip."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fixed, self.adapter = nn.Linear(13, 13).requires_grad_(False), nn.Linear(13, 13)

        def forward(self, x, adapted):
            x = x + self.fixed(x).tanh()
            return x + self.adapter(x) if adapted else x

    def __init__(self, choose):
        super().__init__(choose)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x):
        left_out = self.choose(int(self.passes), dist.get_rank())
        self.passes += 1
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, left_out is None)
        return self.leave(x + self.spare(x))


def on_rank_1(what):
    return lambda _pass, rank: what if rank == 1 else None


def not_always(number, rank):
    """Parameters without gradient on rank 1, then on both ranks, then on none, then on rank 0."""
    return "parameters" if rank in ((1,), (0, 1), (), (0,))[number % 4] else None


def in_turn(number, rank):
    """Parameters without gradient on one of two ranks, and in the next pass on the other rank."""
    return "parameters" if (number + rank) % 2 else None


def every_other_time(number, _rank):
    return "parameters" if number % 2 else None


def loss_of_nothing(model, batch):
    loss(model, batch)
    return torch.zeros((), requires_grad=True)


def unused_when_sharded(rank):
    """Return the errors of ranks that differ, and the weights of runs in which ranks may differ."""

    def train(way, choose, *, unused, make=Choosy):
        made = trainer(way, rank, make=lambda _: make(choose), unused=unused)
        of_nothing = choose(0, rank) == "any of it"
        for step in batches(way, rank, 0, 8):
            made.training_step(step, loss_of_nothing if of_nothing else loss)
        whole = made.whole_module()
        return [] if whole is None else flat(whole)

    def refused(what, *, unused):
        try:
            train(Way("fsdp", 2, accumulation=2), on_rank_1(what), unused=unused)
        except UserError as error:
            return f"{type(error).__name__}: {error}"

    found = {
        what: [refused(what, unused=unused) for unused in settings]
        for what, settings in (
            ("parameters", (False,)),
            ("its result", (False, True)),
            ("last block", (False, True)),
            ("what is given", (False, True)),
            ("any of it", (False,)),
        )
    }
    # The ranks differ in each pass, but not over a step of two passes.
    found["in turn"] = [
        train(Way(kind, 2, accumulation=2), in_turn, unused=kind == "ddp", make=make)
        for make in (Choosy, Adapted)
        for kind in ("ddp", "fsdp")
    ]
    for name, choose, unused in (("some", not_always, True), ("all", every_other_time, False)):
        found[name] = train(Way("ddp", 2), choose, unused=True)
        for way in (Way("fsdp", 2, recompute="full"), Way("fsdp", 2, reshard=False)):
            found[f"{name} {way.name}"] = train(way, choose, unused=unused)
        found[f"{name} adapted"] = [
            train(Way(kind, 2), choose, unused=True, make=Adapted) for kind in ("ddp", "fsdp")
        ]
        # A step has two passes: some parameters get a gradient only in the first pass.
        found[f"{name} accumulated"] = [
            train(Way(kind, 2, accumulation=2), choose, unused=True) for kind in ("ddp", "fsdp")
        ]
    return found


OPTIMISERS = {
    name: [f"optim.name={name.partition(' ')[0]}", "train.lr=0.01", f"optim.momentum={momentum}"]
    for name, momentum in (
        ("adamw", 0.9), ("adam", 0.9), ("sgd", 0.9), ("sgd without", 0.0), ("muon", 0.9),
    )
}  # fmt: skip


def every_optimiser(rank):
    """Return the weights after three steps of each, replicated and sharded, with default kernels."""
    found = {}
    for name, wanted in OPTIMISERS.items():
        config = resolve([override_layer(wanted)])
        for way in (Way("ddp", 2), Way("fsdp", 2), Way("fsdp", 2, shard="hybrid")):
            made = trainer(way, rank, build=lambda model, c=config: build_optimizer(model, c))
            for step in batches(way, rank, 0, 3):
                made.training_step(step, loss)
            whole = made.whole_module()
            found.setdefault(name, []).append([] if whole is None else flat(whole))
    return found


class OwnCompiler(Net):
    """Blocks that compile themselves; their graphs must not break."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        for block in self.blocks:
            block.compile(fullgraph=True, backend="eager")


def blocks_with_a_compiler_of_their_own(rank):
    way = Way("fsdp", 2)
    made = trainer(way, rank, make=OwnCompiler, unused=True)
    return [made.training_step(step, loss).loss.item() for step in batches(way, rank, 0, 2)]


def refusals(rank):
    """Return the trainer's errors for invalid combinations."""
    found = []
    for way, optimizer in ((Way("single", 2), None), (Way("fsdp", 2), torch.optim.SGD)):
        try:
            trainer(way, rank, optimizer=optimizer)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


SCENARIOS = {
    4: [validation_when_sharded, communication_when_sharded, a_mesh_of_its_own_groups],
    2: [
        unused_parameters,
        unused_when_sharded,
        unfreezing_when_sharded,
        thawed_in_the_loop,
        blocks_with_a_compiler_of_their_own,
        refusals,
        offloading_from_the_cpu,
        running_statistics_in_bf16,
        every_optimiser,
        the_shipped_gpt_by_size,
        a_use_that_is_found_in_the_step,
    ],
}
