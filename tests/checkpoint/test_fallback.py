"""Ranks restore together: they take the same step, whatever one of them finds on its disk."""

import os

import pytest
import torch.distributed as dist
import xxhash

from hpcrun.checkpoint.sharded.rank_file import pack
from hpcrun.storage.errors import CheckpointError, ReadFailure
from hpcrun.storage.index import INDEX, Place, decode, encode
from hpcrun.storage.store import CheckpointStore
from tests.support.on_ranks import agreed, ranks

from .faults import Broken, Flipping


@ranks(4)
def test_damage_that_any_rank_finds_makes_all_fall_back_together(folder, rank):
    engine = folder.engine()
    for step in (1, 2, 3):
        folder.save(engine, step)
    folder.spoil(3, "rank-00003.bin")
    folder.spoil(2, "rank-00000.bin")
    restored = folder.restore(folder.engine(owner="7-1"))
    assert restored.step == restored.shared["weights"][0] == 1
    assert restored.own == {"rank": rank, "step": 1}
    first, second = restored.notes
    assert first.startswith("step 3 skipped: rank 3 (")
    assert "rank-00003.bin: its content differs from the written content" in first
    assert second.startswith("step 2 skipped: rank 0 (")


@ranks(4)
def test_a_checkpoint_that_one_node_cannot_read_stays_the_newest(folder, rank):
    for step in (1, 2):
        folder.save(folder.engine(), step)
    with pytest.raises(ReadFailure) as caught:
        folder.restore(folder.engine(Broken("read_into"), on=2))
    assert caught.value.here == (rank == 2)
    error = str(caught.value)
    assert error.startswith("step 2: rank 2 (")
    assert "cannot be read: Input/output error (EIO); the checkpoint is kept" in error
    assert "another --name" not in error
    assert folder.names() == ["step-000000001", "step-000000002"]


@ranks(4)
def test_damage_that_rank_0_does_not_find_blames_the_node(folder, rank):
    for step in (1, 2):
        folder.save(folder.engine(), step)
    engine = folder.engine(Flipping("rank-00002"), on=2)
    with pytest.raises(ReadFailure) as caught:
        folder.restore(engine)
    assert caught.value.here == (rank == 2)
    error = str(caught.value)
    assert error.startswith("step 2: rank 2 (")
    assert "(hash); rank 0 (" in error
    assert "reads the same files without damage; the checkpoint is kept" in error
    # The first save renames damaged checkpoints.
    folder.save(engine, 3)
    assert folder.names() == ["step-000000001", "step-000000002", "step-000000003"]
    assert folder.restore(folder.engine(owner="7-1")).step == 3


def forge(root):
    """Copy step 1 to step 2 with a function in its plain data, and all hashes correct."""
    store = CheckpointStore(root, "6-6")
    index = decode(store.read(1, INDEX))
    code = pack({"weights": os.getcwd})
    draft = store.begin(2)
    records = []
    for record in store.manifest(1).files:
        content = store.read(1, record.name)
        if record.name == "rank-00000.bin":
            place = Place(record.name, len(content), len(code), xxhash.xxh3_128_hexdigest(code))
            index.blobs["shared"] = place
            content += code
        if record.name == INDEX:
            content = encode(index)
        with store.open_file(draft, record.name) as stream:
            stream.write(content)
        records.append(stream.record)
    store.commit(draft, 2, records, store.manifest(1).world_size, {}, lambda: None)


@ranks(4)
def test_code_in_a_checkpoint_is_not_run(folder, rank):
    engine = folder.engine()
    folder.save(engine, 1)
    # These bytes match their hash, and would run code if unpickled without checks.
    if rank == 0:
        forge(folder.root)
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        folder.restore(engine)
    error = agreed(str(caught.value))
    assert ": rank 0 (" in error
    assert "contains more than tensors and plain data, and is not loaded; check who" in error
