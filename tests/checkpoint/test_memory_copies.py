"""Copies of the last saves in memory: which step a restart restores, and when it uses the disk."""

import contextlib
import os
import re
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpcrun.checkpoint.state.training import TrainingState
from hpcrun.checkpoint.state.tree import split
from hpcrun.run.memory_keeper import KeeperClient, MemoryFile
from hpcrun.run.record import OwnedByAnotherAttempt
from tests.support.on_ranks import agreed, ranks

from . import single_rank
from .keepers import FILES, RUN, engine, flip, keeper, keepers, opened, stored
from .rank_folder import RankFolder
from .single_rank import nothing


def save(saving, rank, step, *, in_memory=False, size=1000):
    """Save a state that contains its step; return the outcome."""
    shared = {"weights": torch.full((size,), float(step)), "step": step}
    own = {"rank": rank, "step": step}
    saving.start(step, shared, own, {"step": step}, lambda _: True, disk=not in_memory)
    (outcome,) = saving.wait()
    dist.barrier()  # every rank has written to its keeper
    assert outcome.ok
    return outcome


def save_twice(folder, client, rank):
    """Save step 10 on disk, and then step 12 in memory."""
    saving = engine(folder, client)
    save(saving, rank, 10)
    save(saving, rank, 12, in_memory=True)


def restored(folder, client, **options):
    """Restore as a new attempt; the parts of the result must belong to one step."""
    found = engine(folder, client, **options).restore(nothing)
    agreed((found.step, found.notes, found.snapshot))
    assert (found.shared["weights"] == found.step).all()
    assert found.shared["step"] == found.step
    assert found.own == {"rank": folder.rank, "step": found.step}
    return found


def from_memory(found):
    return any("was read from memory" in note for note in found.notes)


def build(kind, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 7), nn.GELU(), nn.Linear(7, 5))
    for layer in (model[0], model[2], model) if kind == "sharded" else ():
        fully_shard(layer)
    return TrainingState(model, torch.optim.AdamW(model.parameters(), lr=0.02))


def train(state, steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        state.model(torch.randn(4, 13, generator=generator)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()


def bits(state):
    """Return the bytes of the weights and moments of this rank."""
    _, tensors = split(state.capture({})[0])
    local = {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in tensors.items()
    }
    return {name: value.contiguous().view(-1).numpy().tobytes() for name, value in local.items()}


@pytest.mark.parametrize("nodes", [1, 2], ids=["one node", "two nodes"])
@pytest.mark.parametrize("kind", ["replicated", "sharded"])
@ranks(2)
def test_memory_and_disk_restore_the_same_bits(folder, rank, kind, nodes):
    with keepers(rank, nodes) as client:
        saving, state = engine(folder, client), build(kind, 1)
        train(state, 3)
        shared, own = state.capture({"note": "kept"})
        assert saving.save(3, shared, own, {}, state.alike()).ok
        want, draws = bits(state), torch.rand(3)
        for source in (client, KeeperClient("", RUN)):
            fresh = build(kind, 2)
            found = fresh.restore(engine(folder, source).restore(fresh.template()))
            assert agreed(from_memory(found)) == (source is client)
            assert agreed(found.step) == 3
            assert found.shared["extra"] == {"note": "kept"}
            assert bits(fresh) == want
            assert torch.equal(torch.rand(3), draws)


@ranks(2)
def test_memory_has_newer_steps_than_the_disk(folder, rank):
    with keepers(rank, 1) as client:
        saving = engine(folder, client)
        assert not save(saving, rank, 10).in_memory
        for step in (12, 14):
            assert save(saving, rank, step, in_memory=True).in_memory
        assert folder.names() == ["step-000000010"]
        assert stored(client) == {14: FILES}
        found = restored(folder, client)
        assert (found.step, found.committed) == (14, 10)
        assert found.notes == ("step 14 was read from memory (the newest step on disk is 10)",)


@ranks(2)
def test_a_step_before_the_first_save_is_in_memory(folder, rank):
    with keepers(rank, 1) as client:
        save(engine(folder, client), rank, 2, in_memory=True)
        assert restored(folder, client).notes == ("step 2 was read from memory (none is on disk)",)


@ranks(2)
def test_an_older_step_in_memory_is_not_used(folder, rank):
    with keepers(rank, 1) as client:
        save(engine(folder, client), rank, 10)
        save(engine(folder, KeeperClient("", RUN)), rank, 20)
        found = restored(folder, client)
        assert (found.step, from_memory(found)) == (20, False)
        assert stored(client) == {}


@ranks(2)
def test_another_start_of_the_job_finds_nothing(folder, rank):
    with keepers(rank, 1) as client:
        save_twice(folder, client, rank)
        with keepers(rank, 1) as later:
            assert restored(folder, later).step == 10
        assert restored(folder, client, run="/runs/b").step == 10
        assert restored(folder, client).step == 12


def put_again(client, missing):
    """Put step 12 without the file ``missing``, as ranks that were killed in the middle do."""
    files = [file for file in client.files() if file.step == 12]
    descriptors = [client.open(file) for file in files]
    client.only()
    for file, descriptor in zip(files, descriptors, strict=True):
        if file.name != missing:
            client.put(file, descriptor)
        os.close(descriptor)


def cut(client, most):
    with opened(client, "rank-00001.bin") as (descriptor, size):
        os.ftruncate(descriptor, min(size - 1, most))


@pytest.mark.parametrize(
    ("spoil", "how", "told"),
    [
        (flip, "rank-00001.bin", "step 12 skipped: rank 1 (.*rank-00001.bin"),
        (flip, "index.json", "step 12 skipped: rank 0 (.*index.json"),
        (flip, "manifest.json", "step 12 skipped: rank 0 (.*manifest.json"),
        (cut, 1 << 30, "rank-00001.bin"),
        (cut, 0, "rank-00001.bin"),
        (
            put_again,
            "rank-00001.bin",
            "rank-00001.bin: cannot be read: not in the memory of a node",
        ),
        (put_again, "manifest.json", None),
    ],
)
@ranks(2)
def test_a_spoiled_snapshot_in_memory_leads_to_the_disk(folder, rank, spoil, how, told):
    with keepers(rank, 1) as client:
        save_twice(folder, client, rank)
        if rank == 0:
            spoil(client, how)
        dist.barrier()
        found = restored(folder, client)
        assert (found.step, found.snapshot) == (10, None)
        assert len(found.notes) == (told is not None)
        for note in found.notes:
            pattern = f"the copies in memory are not used: .*{told.replace('(', '[(]')}"
            assert re.match(pattern, note), note
        assert stored(client) == {}


@ranks(2)
def test_an_incomplete_snapshot_leaves_the_one_before(folder, rank):
    with keepers(rank, 1) as client:
        save(engine(folder, client), rank, 12, in_memory=True)
        if rank == 0:
            (manifest,) = (file for file in client.files() if file.name == "manifest.json")
            client.put(
                MemoryFile(14, "half", "manifest.json", manifest.size), client.open(manifest)
            )
        dist.barrier()
        assert restored(folder, client).step == 12
        assert stored(client) == {12: FILES}


@ranks(2)
def test_a_lost_node_leads_to_the_disk(folder, rank):
    with keepers(rank, 2) as client:
        save_twice(folder, client, rank)
        with replaced(client, rank) as new:
            assert restored(folder, new).step == 10


@ranks(4)
def test_a_peer_has_the_memory_of_a_lost_node(folder, rank):
    with keepers(rank, 2) as client:
        saving = engine(folder, client, peers=True)
        save(saving, rank, 10)
        # More bytes than the buffers of a connection.
        save(saving, rank, 12, in_memory=True, size=5_000_000)
        everything = {f"rank-0000{number}.bin" for number in range(4)} | FILES
        assert stored(client) == {12: everything}
        with replaced(client, rank) as new:
            found = restored(folder, new, peers=True)
            assert (found.step, found.committed) == (12, 10)
            saving = engine(folder, new, peers=True)
            save(saving, rank, 14, in_memory=True)
            assert stored(new) == {14: everything}


@contextlib.contextmanager
def replaced(client, rank):
    """Replace the first node by a spare without memory."""
    lost = client.key.endswith("/0")
    spare = KeeperClient(f"{client.secret}/spare", RUN)
    with keeper(spare.key) if rank == 0 else contextlib.nullcontext():
        dist.barrier()
        yield spare if lost else client
        dist.barrier()


@ranks(2)
def test_memory_holds_one_snapshot_between_saves(folder, rank):
    with keepers(rank, 1) as client:
        saving = engine(folder, client)
        for step in range(1, 6):
            save(saving, rank, step, in_memory=step % 2 == 0)
            assert stored(client) == {step: FILES}
        # Two buffers of 2 MB: the snapshot and the one before.
        assert saving.staging.size == 2 * (2 << 20)


@ranks(2)
def test_too_little_memory_ends_the_copies_with_one_line(folder, rank):
    with keepers(rank, 1) as client:
        saving = engine(folder, client, limit=1 << 30, on_host=1 << 50)
        assert not save(saving, rank, 1).notes
        outcome = save(saving, rank, 2)
        (note,) = outcome.notes
        assert note.startswith("no copies of the saves stay in memory from here on: rank 0 (")
        assert "set checkpoint.host_memory" in note
        assert stored(client) == {}
        assert saving.staging.size == 2 << 20
        assert not save(saving, rank, 3).notes
        assert not saving.ready_for_memory()
        assert restored(folder, client).step == 3


@ranks(2)
def test_saves_continue_without_the_keeper(folder, rank):
    with keepers(rank, 1) as client:
        saving = engine(folder, client)
        save(saving, rank, 1)
    assert len(save(saving, rank, 2).notes) == 1
    assert not save(saving, rank, 3).notes
    assert restored(folder, client).step == 3


@ranks(2)
def test_a_superseded_attempt_keeps_no_snapshot(folder, rank):
    owned = []

    def still_mine():
        if owned:
            raise OwnedByAnotherAttempt("7-1 owns this run now")

    with keepers(rank, 1) as client:
        saving = engine(folder, client, still_mine=still_mine)
        save(saving, rank, 1)
        owned.append(False)
        saving.start(2, {}, {}, {}, disk=False)
        (outcome,) = saving.wait()
        assert agreed((outcome.ok, outcome.fenced)) == (False, True)
        assert not saving.ready_for_memory()
        assert stored(client) == {1: FILES}


@ranks(2)
def test_no_snapshot_begins_while_a_rank_saves(folder, rank):
    with keepers(rank, 1) as client:
        going_on = threading.Event()
        saving = engine(folder, client, still_mine=lambda: going_on.wait(300))
        assert saving.ready_for_memory()
        saving.start(1, {}, {}, {})
        assert not saving.ready_for_memory()
        going_on.set()
        saving.wait()
        assert saving.ready_for_memory()


def test_a_single_rank_keeps_copies(root):
    with keeper() as (client, _):
        folder = RankFolder(root, 0, 1)
        saving = engine(folder, client, on_host=1)
        single_rank.save(saving, 1)
        saving.start(2, single_rank.state(2), {"rank": 0}, {"step": 2}, disk=False)
        assert saving.wait()[0].ok
        found = engine(folder, client, on_host=1).restore(nothing)
        single_rank.require_state(found, 2)
        assert found.committed == 1
