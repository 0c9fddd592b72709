"""Faults of the copies in memory: keepers that are away, errors of one rank, ranks that are killed."""

import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hpcrun.checkpoint.memory import peers
from hpcrun.checkpoint.sharded import commit
from hpcrun.run.memory_keeper import KeeperClient, new_key, start
from tests.support.on_ranks import agreed, ranks

from .keepers import FILES, RUN, engine, flip, keepers, stored
from .single_rank import nothing
from .test_memory_copies import from_memory, restored, save, save_twice


def away(client):
    """Return a client of a keeper that does not answer."""
    return KeeperClient(f"{client.secret}/away", RUN)


@pytest.fixture
def no_waits(monkeypatch):
    """Make a wait of this process an error."""

    def sleep(seconds):
        raise AssertionError(f"a wait of {seconds} s")

    monkeypatch.setattr(time, "sleep", sleep)


@ranks(2)
def test_a_start_does_not_wait_for_a_missing_keeper(folder, rank, no_waits):
    client = KeeperClient(new_key(), RUN)
    assert engine(folder, client).restore(nothing) is None


@ranks(2)
def test_the_first_snapshot_waits_for_a_keeper_that_starts_late(folder, rank):
    box = [new_key()]
    dist.broadcast_object_list(box, src=0)
    client = KeeperClient(box[0], RUN)
    saving = engine(folder, client)
    saving.start(1, {}, {}, {}, disk=False)
    process = start(client.key) if rank == 0 else None
    (outcome,) = saving.wait()
    dist.barrier()
    assert outcome.ok
    assert stored(client) == {1: FILES}
    dist.barrier()
    if process is not None:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("nodes", [1, 2])
@ranks(2)
def test_a_snapshot_that_a_later_attempt_has_superseded_stays_gone(folder, rank, nodes):
    with keepers(rank, nodes) as client:
        save_twice(folder, client, rank)
        # The second attempt does not reach the keeper of the last node.
        there = away(client) if rank == 1 or nodes == 1 else client
        assert restored(folder, there).step == 10
        save(engine(folder, KeeperClient("", RUN)), rank, 11)
        found = restored(folder, client)
        assert (found.step, from_memory(found)) == (11, False)
        assert stored(client) == {}


@ranks(2)
def test_damaged_memory_and_an_empty_disk_end_all_ranks(folder, rank):
    with keepers(rank, 1) as client:
        save(engine(folder, client), rank, 2, in_memory=True)
        if rank == 0:
            flip(client, "rank-00001.bin")
        dist.barrier()
        with pytest.raises(RuntimeError) as raised:
            engine(folder, client).restore(nothing)
        line = agreed(str(raised.value))
        assert line.startswith("the copies in memory are not used: ")
        assert "step 2 skipped: rank 1 (" in line
        assert line.endswith("no checkpoint is on disk; start again to begin at step 0")
        assert stored(client) == {}
        dist.barrier()
        assert engine(folder, client).restore(nothing) is None


def broken(*arguments, **named):
    raise ZeroDivisionError("broken")


@pytest.mark.parametrize("copied", [False, True], ids=["own node", "peers"])
@pytest.mark.parametrize("where", ["hashes", "put", "thread", "interfaces"])
@ranks(2, limit=60)
def test_all_ranks_learn_of_an_error_of_any_type(folder, rank, monkeypatch, where, copied):
    with keepers(rank, 2) as client:
        saving = engine(folder, client, peers=copied)
        save(saving, rank, 1, in_memory=True)
        if rank == 1:
            if where == "hashes":
                monkeypatch.setattr(commit, "hashed", broken)
            elif where == "put":
                monkeypatch.setattr(KeeperClient, "put", broken)
            elif where == "interfaces":
                monkeypatch.setattr(peers, "listen", broken)
            else:
                monkeypatch.setattr(peers, "threading", SimpleNamespace(Thread=broken))
        saving.start(2, {}, {}, {}, disk=False)
        (outcome,) = saving.wait()
        fails = copied or where in ("hashes", "put")
        assert agreed(outcome.ok) == (not fails)
        assert ("rank 1" in (outcome.error or "")) == (where in ("hashes", "put"))


@pytest.mark.parametrize("where", ["thread", "files"])
@ranks(2, limit=60)
def test_an_error_of_any_type_leads_all_ranks_to_disk(folder, rank, monkeypatch, where):
    with keepers(rank, 2) as client:
        save_twice(folder, client, rank)
        if rank == 1 and where == "thread":
            monkeypatch.setattr(peers, "threading", SimpleNamespace(Thread=broken))
        elif rank == 1:
            monkeypatch.setattr(KeeperClient, "files", broken)
        assert restored(folder, client).step == 10
