"""Scenarios of ``ranks.py``: each tensor is read by one of the ranks that hold it."""

import errno
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hpcrun.checkpoint.sharded import copies
from hpcrun.checkpoint.storage.errors import CheckpointError, ReadFailure
from hpcrun.checkpoint.storage.filesystem import FileSystem
from hpcrun.checkpoint.storage.index import INDEX, decode
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.control import making

LARGE = 100_000
"""Bytes: reads of tensors in these scenarios are longer, all other reads are shorter."""


class Counting(FileSystem):
    """Counts the bytes of large reads; ``fault`` may change their bytes or raise."""

    def __init__(self, fault=None):
        self.read, self._fault = 0, fault

    def read_into(self, descriptor, view, position):
        count = super().read_into(descriptor, view, position)
        if count > LARGE:
            self.read += count
            if self._fault is not None:
                self._fault(view)
        return count


def refuse(view):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def flip(view):
    view[0] ^= 1


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


def save(ranks, step, values):
    outcome = ranks.writer().save(step, {"weights": values}, {}, {}, lambda _: True)
    assert outcome.ok, outcome.error


def attempt(ranks, into, *, fault=None, on=0, whole=content, group=None):
    """Restore into ``into``; return the error or step, equality of the values, notes, and all bytes read."""
    counting = Counting(fault if ranks.rank == on else None)
    writer = ranks.writer(counting, on=ranks.rank, group=group)
    result = {}
    try:
        restored = writer.restore(lambda *_: {"weights": into})
    except CheckpointError as error:
        result |= {"error": str(error), "here": getattr(error, "here", None)}
        result["read failure"] = isinstance(error, ReadFailure)
    else:
        expected = whole(restored.step)
        found = {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in into.items()
        }
        result |= {
            "step": restored.step,
            "equal": all(torch.equal(found[name], expected[name]) for name in expected),
            "notes": restored.notes,
        }
    everyone = [None] * ranks.world_size
    dist.all_gather_object(everyone, counting.read)
    return result | {"read": everyone}


def replicated_state(ranks):
    save(ranks, 3, content(3))
    return attempt(ranks, blank(content(3)))


def copies_of_shards(ranks):
    """Hybrid sharding: two copies of two shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    place = [Replicate(), Shard(0)]
    save(ranks, 1, sharded(matrices(1), mesh, place))
    return attempt(ranks, sharded(blank(matrices(1)), mesh, place), whole=matrices)


def ranks_that_hold_different_tensors(ranks):
    """Give one rank another kind of tensor: a common division of the reading would be wrong."""
    save(ranks, 1, content(1))
    into = blank(content(1))
    mesh = init_device_mesh("cpu", (4,))
    if ranks.rank == 3:
        into["w0"] = DTensor.from_local(into["w0"], mesh, [Replicate()], run_check=False)
    result = attempt(ranks, into)
    dist.barrier()
    return result


def spoil(ranks, step, name):
    """Flip a bit of the tensor ``name`` on the disk."""
    root = ranks.folder / "checkpoints"
    if ranks.rank == 0:
        store = CheckpointStore(root, "6-6")
        place = decode(store.read(step, INDEX)).tensors[f"weights/{name}"].pieces[0].place
        with (store.path(step) / place.file).open("r+b") as file:
            file.seek(place.position + place.length // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 16]))
    dist.barrier()


def a_tensor_of_one_reader_is_damaged(ranks):
    for step in (1, 2):
        save(ranks, step, content(step))
    spoil(ranks, 2, "w4")
    return attempt(ranks, blank(content(2)))


def one_reader_is_refused(ranks):
    save(ranks, 1, content(1))
    return attempt(ranks, blank(content(1)), fault=refuse, on=2)


def one_reader_reads_other_bytes(ranks):
    save(ranks, 1, content(1))
    return attempt(ranks, blank(content(1)), fault=flip, on=2)


def through_the_control_group(ranks):
    """Share tensors that the group of the training does not take, as NCCL does not take the CPU's."""
    save(ranks, 1, content(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "FAN_OUT", 2)
        group = making.new_control_group()
        patch.setattr(copies, "_takes", lambda group, _: group is not dist.group.WORLD)
        result = attempt(ranks, blank(content(1)), group=group)
    dist.destroy_process_group(group)
    return result


SCENARIOS = [
    replicated_state,
    through_the_control_group,
    copies_of_shards,
    ranks_that_hold_different_tensors,
    a_tensor_of_one_reader_is_damaged,
    one_reader_is_refused,
    one_reader_reads_other_bytes,
]


def on_fewer_ranks(ranks):
    """Load the shards of four ranks on two: as whole tensors, and as shards without copies."""
    saved = type(ranks)(ranks.rank, ranks.world_size, ranks.folder.parent / "copies_of_shards")
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    shards = sharded(blank(matrices(1)), mesh, [Shard(0)])
    return (
        attempt(saved, blank(matrices(1)), whole=matrices),
        attempt(saved, shards, whole=matrices),
    )
