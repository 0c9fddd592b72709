"""Ranks save together: all ranks learn of an event on one rank."""

import threading

import pytest
import torch

from hpcrun.storage.disk import FileSystem
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.store import CheckpointStore
from tests.support.on_ranks import agreed, ranks

from . import single_rank
from .faults import Broken
from .rank_folder import fenced


@ranks(4)
def test_all_ranks_learn_of_a_save_and_restore_their_states(folder, rank):
    engine = folder.engine(keep=2)
    outcomes = [agreed(folder.save(engine, step)) for step in (1, 2, 3)]
    assert [outcome.ok for outcome in outcomes] == [True, True, True]
    assert outcomes[2].path == folder.root / "step-000000003"
    assert outcomes[2].bytes > 4000
    assert folder.names() == ["step-000000002", "step-000000003"]
    restored = folder.restore(folder.engine(owner="7-1"))
    assert restored.step == 3
    assert restored.shared["weights"][0] == 3.0
    assert restored.own == {"rank": rank, "step": 3}
    assert restored.meta == {"step": 3}
    assert restored.notes == ()


@pytest.mark.parametrize(
    ("fault", "on", "why"),
    [
        (
            ("write", "rank-00002", 28), 2,
            "No space left on device (ENOSPC); 0 B were written",
        ),
        (("make_directory", ".tmp-", 13), 0, "cannot begin a checkpoint: Permission denied"),
        (("rename", ".tmp-"), 0, "cannot be committed: Input/output error"),
    ],
)  # fmt: skip
@ranks(4)
def test_an_error_of_one_rank_fails_the_save_on_all(folder, fault, on, why):
    good = folder.engine()
    folder.save(good, 1)
    failed = agreed(folder.save(folder.engine(Broken(*fault), on=on), 2))
    assert not failed.ok
    assert not failed.fenced
    assert failed.error.startswith(f"rank {on} (")
    assert why in failed.error
    assert folder.names() == ["step-000000001"]
    assert folder.save(good, 2).ok
    assert folder.restore(good).step == 2


@pytest.mark.parametrize("call", [1, 2], ids=["before it begins", "before the commit"])
@ranks(4)
def test_all_ranks_learn_that_they_are_superseded(folder, call):
    calls = []

    def still_mine():
        calls.append(1)
        if len(calls) == call:
            fenced()

    outcome = agreed(folder.save(folder.engine(still_mine=still_mine), 1))
    assert outcome.fenced
    assert not outcome.ok
    assert outcome.error == "7-1 owns this run now; 7-0 stops writing"
    assert folder.names() == []


@ranks(4)
def test_a_defect_on_rank_0_leaves_no_rank_waiting(folder):
    def stumble():
        raise ZeroDivisionError("a defect")

    error = agreed(folder.engine(still_mine=stumble).save(1, {}, {}, {}).error)
    assert error.startswith("rank 0 (")
    assert error.endswith("): ZeroDivisionError: a defect")


@ranks(4)
def test_a_save_removes_leftovers_and_a_restore_does_not(folder, rank):
    if rank == 0:
        CheckpointStore(folder.root, "6-0").begin(1)
    assert folder.names() == ["step-000000001.tmp-6-0"]
    folder.restore(folder.engine())
    assert folder.names() == ["step-000000001.tmp-6-0"]
    folder.save(folder.engine(), 2)
    assert folder.names() == ["step-000000002"]


def test_a_snapshot_waits_for_a_slow_writer_of_its_buffer(root):
    going_on = threading.Event()

    class Slow(FileSystem):
        def create(self, path):
            # Before the write: a small file is copied from the buffer first.
            assert going_on.wait(300)
            return super().create(path)

    engine = single_rank.engine(root, "7-0", Slow())
    # Long enough that a snapshot which does not wait is complete.
    begin = threading.Timer(1, going_on.set)
    for step in (1, 2):
        values = single_rank.state(step)
        engine.start(step, values, {"rank": 0}, {"step": step})
        if step == 1:
            begin.start()
        # Training changes the saved tensors before they are written.
        values["model"]["w"].zero_()
    assert [(outcome.ok, outcome.step) for outcome in engine.wait()] == [(True, 1), (True, 2)]
    for skip, step in (((), 2), ((2,), 1)):
        found = single_rank.engine(root, "7-1").restore(single_rank.nothing, skip)
        single_rank.require_state(found, step)


def test_tensors_of_another_shape_are_refused_but_not_damage(tmp_path):
    root = tmp_path / "checkpoints"
    assert single_rank.save(single_rank.engine(root, "7-0"), 1).ok
    with pytest.raises(
        CheckpointError,
        match=r"step 1 in .*: rank 0 .*: model/b: \(7,\) in the checkpoint, but \(3,\) here",
    ):
        single_rank.engine(root, "7-1").restore(lambda *_: {"model": {"b": torch.zeros(3)}})


def test_an_error_of_loading_here_is_not_damage(root):
    saving = single_rank.engine(root, "7-0")
    for step in (1, 2):
        assert single_rank.save(saving, step).ok
    with pytest.raises(
        CheckpointError,
        match=r"step 2 in .*: rank 0 .* cannot be loaded here: MemoryError: too much",
    ):
        single_rank.engine(root, "7-1").restore(out_of_memory)
    single_rank.require_state(single_rank.restored(root), 2)


def out_of_memory(entries, skeleton):
    raise MemoryError("too much")
