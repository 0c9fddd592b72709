"""The write plan is that of torch's planner, without the exchange of plans."""

import re
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpcrun.checkpoint.sharded.plan import describe, make_plan
from hpcrun.checkpoint.sharded.rank_file import StoreReader
from hpcrun.ranks.collective import Ranks
from hpcrun.storage.errors import CheckpointError
from tests.support.on_ranks import gathered, ranks


def planned(tensors, rank, world_size, whole=True):
    """Return the plan of this rank; ``whole``: whole tensors are the same on all ranks."""
    group = dist.new_group(backend="gloo")
    all_ranks = Ranks(rank, world_size, group, CheckpointError)
    return make_plan(describe(tensors, lambda _: whole), tensors, all_ranks)


def by_torch(tensors, rank):
    """Return the name, offsets and sizes of each chunk that this rank writes by torch's planner."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, is_coordinator=rank == 0)
    plans, _ = planner.create_global_plan(gathered(planner.create_local_plan()))
    return sorted(
        (item.index.fqn, tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))
        for item in plans[rank].items
        if 0 not in item.tensor_data.chunk.sizes
    )


def chunks(plan):
    return sorted((part.name, part.offsets, part.sizes) for part in plan.parts)


def weights():
    """Return tensors of several shapes and types; 4 ranks divide none of the first dimensions evenly."""
    shapes = [(7, 3), (5,), (2, 9), (1,), (13, 1), (6, 2, 3)]
    kinds = [torch.float32, torch.bfloat16]
    return {
        f"layer.{number}.weight": torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=kind).view(
            shape
        )
        for number, (shape, kind) in enumerate((shape, kind) for kind in kinds for shape in shapes)
    }


def on_mesh(*placements, of=weights):
    shape = (4,) if len(placements) == 1 else (2, 2)
    mesh = init_device_mesh("cpu", shape)
    return {name: distribute_tensor(value, mesh, placements) for name, value in of().items()}


def even_weights():
    return {f"layer.{number}": torch.ones(2 * number, 3) for number in range(1, 12)}


def tensor_parallel():
    """Return the weights of a model with FSDP over tensor parallelism, two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return model.state_dict()


# torch's planner weighs a shard by the size of the whole tensor, and fewer loads than hpcrun's.
EQUAL = {
    "DDP": weights,
    "FSDP": lambda: on_mesh(Shard(0)),
    "hybrid": lambda: on_mesh(Replicate(), Shard(0), of=even_weights),
    "sharded twice": lambda: on_mesh(Shard(0), Shard(0)),
}
SAME_CHUNKS = {
    "uneven hybrid": lambda: on_mesh(Replicate(), Shard(0)),
    "FSDP of all columns": lambda: on_mesh(Shard(1), of=even_weights),
    "tensor parallel": tensor_parallel,
}


@pytest.mark.parametrize("kind", EQUAL | SAME_CHUNKS)
@ranks(4)
def test_each_rank_writes_the_chunks_of_torchs_planner(rank, kind):
    tensors = (EQUAL | SAME_CHUNKS)[kind]()
    plan = planned(tensors, rank, 4)
    written, expected = gathered(chunks(plan)), gathered(by_torch(tensors, rank))
    assert sorted(chain(*written)) == sorted(chain(*expected))
    if kind in EQUAL:
        assert written == expected
    total = sum(value.numel() * value.dtype.itemsize for value in tensors.values())
    assert sum(gathered(plan.size)) == total
    if rank == 0:
        assert plan.total == total


@ranks(4)
def test_a_tensor_of_only_some_ranks_is_written_by_them(rank):
    # Stages of a pipeline: each has its mesh and weights, and both have the last weight.
    stage = DeviceMesh("cpu", [0, 1] if rank < 2 else [2, 3], _init_backend=False)
    tensors = {
        name: DTensor.from_local(torch.ones(2, 3), stage, [Shard(0)], run_check=False)
        for name in (f"stage{rank // 2}", "tied")
    }
    if rank == 2:
        tensors["odd"] = torch.ones(5)
    written = gathered(chunks(planned(tensors, rank, 4)))
    assert sorted(chain(*written)) == sorted(chain(*gathered(by_torch(tensors, rank))))
    assert {name for name, *_ in written[rank]} <= {*tensors}
    # A tensor that may differ between the ranks is written by rank 0 only.
    assert "odd" not in [name for name, *_ in chunks(planned(tensors, rank, 4, whole=False))]


@ranks(4)
def test_all_ranks_refuse_a_tensor_that_a_plan_cannot_cover(rank):
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.ones(8)

    def sharded(rows=2, placement=None, size=8):
        return DTensor.from_local(
            torch.ones(rows),
            mesh,
            [placement or Shard(0)],
            run_check=False,
            shape=(size,),
            stride=(1,),
        )

    cases = {
        "w: has another type, shape or placement": sharded() if rank else whole,
        "w: has another type, shape": whole.double() if rank == 3 else whole,
        "w: no rank has some of its shards": None if rank == 2 else sharded(),
        "w: ranks hold addends": sharded(8, Partial()),
        "w: a shard of shape (3,) is at ((": sharded(3 if rank == 1 else 2),
        "w: a sparse or quantized tensor": whole.to_sparse() if rank == 1 else whole,
    }
    for why, value in cases.items():
        with pytest.raises(CheckpointError, match=re.escape(why)):
            planned({} if value is None else {"w": value}, rank, 4)


@ranks(4)
def test_the_file_holds_every_byte_in_its_place(folder, rank):
    values = weights() | {"plain": torch.arange(11), "flag": torch.tensor([True])}
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = {
        name: distribute_tensor(value, mesh, [Replicate(), Shard(0)]) if "layer" in name else value
        for name, value in values.items()
    }
    # Another order on odd ranks, and a tensor of the last two ranks.
    tensors = dict(sorted(tensors.items(), reverse=rank % 2 == 1))
    if rank > 1:
        stage = DeviceMesh("cpu", [2, 3], _init_backend=False)
        local = torch.full((3,), float(rank))
        tensors["last"] = DTensor.from_local(local, stage, [Shard(0)], run_check=False)
    engine = folder.engine()
    outcome = engine.save(1, tensors, {"rank": rank}, {}, alike=lambda _: True)
    assert outcome.ok, outcome.error
    reader = StoreReader(engine.store, 1)
    values["last"] = torch.tensor([2.0] * 3 + [3.0] * 3)
    for name, value in values.items():
        found = reader.empty(name)
        reader.load({name: found})
        assert torch.equal(found, value)
    assert reader.blob(f"own-{rank:05d}") == {"rank": rank}
