"""Ranks that hold the same tensors read each of them once, and share the bytes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hpcrun.checkpoint.sharded import copies
from hpcrun.ranks import tree_group
from hpcrun.storage.disk import FileSystem
from hpcrun.storage.index import INDEX, decode
from hpcrun.storage.store import CheckpointStore
from tests.support.on_ranks import agreed, gathered, ranks
from tests.support.training.nccl_rules import Rules

LARGE = 100_000
"""Bytes: reads of tensors in these scenarios are longer, all other reads are shorter."""


class Counting(FileSystem):
    """Counts the bytes of large reads."""

    read = 0

    def read_into(self, descriptor, view, position):
        count = super().read_into(descriptor, view, position)
        if count > LARGE:
            self.read += count
        return count


def content(step):
    """Return 14 MB of tensors of several types and strides, which depend on ``step``."""
    big = torch.arange(600_000.0).view(600, 1000) + step
    return {
        **{f"w{number}": big * (number + 1) for number in range(5)},
        "turned": big.T,
        "half": torch.full((100_003,), step, dtype=torch.bfloat16),
        "flags": torch.arange(150_001) % (step + 2) == 0,
        "nothing": torch.zeros(0),
        "count": torch.tensor(step),
    }


def blank(values):
    return {name: torch.zeros_like(value) for name, value in values.items()}


def sharded(values, mesh, placements):
    return {name: distribute_tensor(value, mesh, placements) for name, value in values.items()}


def matrices(step):
    """Return tensors for sharding over rows; five rows leave uneven shards."""
    return {f"m{n}": torch.arange(500_000.0).view(5, 100_000) * (n + step) for n in range(3)}


def size(values):
    """Return the bytes of the large tensors; their reads are counted."""
    return sum(value.nbytes for value in values.values() if value.nbytes > LARGE)


def save(folder, step, values):
    outcome = folder.engine().save(step, {"weights": values}, {}, {}, lambda _: True)
    assert outcome.ok, outcome.error


@dataclass(frozen=True)
class Read:
    """A restore: step, notes, the values as whole tensors, and the large bytes that each rank read."""

    step: int
    notes: tuple[str, ...]
    values: dict[str, torch.Tensor]
    bytes: list[int]

    def require(self, expected):
        """Assert that the values are equal on every bit."""
        for name, value in expected.items():
            assert torch.equal(self.values[name], value), name


def restore(folder, into, *, group=None):
    """Restore into ``into``."""
    counting = Counting()
    engine = folder.engine(counting, on=folder.rank, group=group)
    restored = engine.restore(lambda *_: {"weights": into})
    values = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in into.items()
    }
    return Read(restored.step, tuple(restored.notes), values, gathered(counting.read))


@ranks(4)
def test_the_ranks_together_read_each_byte_of_replicated_state_once(folder):
    save(folder, 3, content(3))
    into = blank(content(3))
    # The tensors have other strides on some ranks, and an odd number of bytes.
    into["flags"] = torch.zeros(2 * 150_001, dtype=torch.bool)[:: 1 + folder.rank % 2][:150_001]
    into["w0"] = torch.zeros(1000, 600).T if folder.rank % 2 else into["w0"]
    read = restore(folder, into)
    read.require(content(3))
    assert sum(read.bytes) == size(content(3))
    # Every rank reads a part, so that all of them read at the same time.
    assert min(read.bytes) > 0


@ranks(4, 2)
def test_the_ranks_together_read_each_byte_of_copied_shards_once(folder, world_size):
    """Two copies of two shards, as in hybrid sharding; then two ranks read them."""
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        place = [Replicate(), Shard(0)]
        save(folder, 1, sharded(matrices(1), mesh, place))
        read = restore(folder, sharded(blank(matrices(1)), mesh, place))
        read.require(matrices(1))
        assert sum(read.bytes) == size(matrices(1))
        assert min(read.bytes) > 0
        return
    whole = restore(folder, blank(matrices(1)))
    whole.require(matrices(1))
    assert sum(whole.bytes) == size(matrices(1))
    mesh = init_device_mesh("cpu", (2,))
    restore(folder, sharded(blank(matrices(1)), mesh, [Shard(0)])).require(matrices(1))


@ranks(4)
def test_rank_0_reads_what_only_the_control_group_can_carry(folder, monkeypatch):
    """Share tensors that the group of the training does not take, as NCCL does not take the CPU's."""
    save(folder, 1, content(1))
    monkeypatch.setattr(tree_group, "FAN_OUT", 2)
    group = tree_group.new_control_group()
    monkeypatch.setattr(copies, "supports", lambda group, _: group is not dist.group.WORLD)
    Rules.installed.calls.clear()
    read = restore(folder, blank(content(1)), group=group)
    read.require(content(1))
    assert read.bytes == [size(content(1)), 0, 0, 0]
    calls = Rules.installed.calls[dist.group.WORLD.group_name]
    assert not [call for call in calls if call.startswith("broadcast_ ")]


@ranks(4)
def test_ranks_that_hold_different_tensors_read_for_themselves(folder, rank):
    """Give one rank another kind of tensor: a common division of the reading would be wrong."""
    save(folder, 1, content(1))
    into = blank(content(1))
    mesh = init_device_mesh("cpu", (4,))
    if rank == 3:
        into["w0"] = DTensor.from_local(into["w0"], mesh, [Replicate()], run_check=False)
    read = restore(folder, into)
    read.require(content(1))
    assert read.bytes == [size(content(1))] * 4


@ranks(4)
def test_damage_that_only_the_reader_sees_makes_all_fall_back(folder):
    for step in (1, 2):
        save(folder, step, content(step))
    store = CheckpointStore(folder.root, "6-6")
    place = decode(store.read(2, INDEX)).tensors["weights/w4"].pieces[0].place
    folder.spoil(2, place.file, place.position + place.length // 2)
    read = restore(folder, blank(content(2)))
    assert read.step == 1
    read.require(content(1))
    (note,) = agreed(read.notes)
    assert note.startswith("step 2 skipped: rank ")
    assert note.endswith("its content differs from the written content (hash)")
