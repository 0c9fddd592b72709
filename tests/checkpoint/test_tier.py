"""A save through a node-local stage folder: first safe from training, then committed on the shared disk."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from hpcrun.checkpoint.sharded import node_staging, rank_file
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.checkpoint.sharded.node_staging import Stage
from hpcrun.checkpoint.storage.filesystem import FileSystem

from .faults import Watched, deadly, die_in_a_child, failing_at
from .single import engine, require_state, restored, save, state

PUBLISHED = ("rename", "step-000000002.tmp-7-1 -> step-000000002")


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Write several blocks per save, the last not full, with direct I/O and one thread (tests fork)."""
    threads, kept = torch.get_num_threads(), (rank_file._DIRECT_FROM, node_staging._BLOCK)
    torch.set_num_threads(1)
    rank_file._DIRECT_FROM, node_staging._BLOCK = 0, 32 << 10
    yield
    rank_file._DIRECT_FROM, node_staging._BLOCK = kept
    torch.set_num_threads(threads)


@pytest.fixture
def fast(tmp_path):
    (tmp_path / "fast").mkdir()
    return tmp_path / "fast"


@pytest.fixture
def prepared(tmp_path):
    """Make a commit."""
    root = tmp_path / "prepared"
    assert save(engine(root, "7-0"), 1).ok
    return root


def staged(root, fast, fs=None, stage_fs=None, **more):
    stage = Stage(fast, stage_fs or fs or FileSystem())
    return engine(root, "7-1", fs, stage=stage, **more)


def watched_save(prepared, fast, tmp_path):
    """Return the calls of an undisturbed save, on both tiers."""
    root, fs = tmp_path / "counted", Watched()
    shutil.copytree(prepared, root)
    assert save(staged(root, fast, fs), 2).ok
    shutil.rmtree(root)
    return fs.trace


def test_the_shared_copy_begins_after_the_staged_file_is_complete(prepared, fast, tmp_path):
    calls = watched_save(prepared, fast, tmp_path)
    fast_writes = [i for i, call in enumerate(calls) if call == ("write", "fast")]
    drained = [i for i, call in enumerate(calls) if call == ("write", "rank-00000.bin")]
    assert len(fast_writes) >= 3
    assert fast_writes[-1] < drained[0] < drained[-1] < calls.index(PUBLISHED)
    assert calls[-1] == ("close", "fast")


@pytest.mark.parametrize("limit", [None, 10])
def test_a_staged_save_has_the_state_at_its_start(tmp_path, fast, limit):
    listed = []

    class Listing(FileSystem):
        def write(self, descriptor, data):
            listed.append(list(fast.iterdir()))
            return super().write(descriptor, data)

    # Also beyond the memory budget: training then waits only for the fast folder.
    root = tmp_path / "checkpoints"
    saving = staged(root, fast, stage_fs=Listing(), staging=Staging(limit=limit))
    mine = state(1)
    saving.start(1, mine, {"rank": 0}, {"step": 1})
    for tensor in mine["model"].values():
        tensor.zero_()
    (outcome,) = saving.wait()
    assert outcome.ok
    assert outcome.notes == ()
    assert outcome.stalled < outcome.seconds
    require_state(restored(root), 1)
    # The kernel may reclaim the memory, and the next save uses it again.
    assert save(saving, 2).ok
    require_state(restored(root), 2)
    assert len(listed) >= 6
    assert not any(listed)


def test_a_kill_at_any_call_to_the_stage_leaves_a_commit_and_an_empty_stage(
    prepared, fast, tmp_path
):
    calls = watched_save(prepared, fast, tmp_path)
    published = calls.index(PUBLISHED) + 1
    # Kills between the remaining calls are tested for the shared tier.
    around = [
        number
        for number in range(2, len(calls) + 1)
        if "fast" in (calls[number - 1][1], calls[number - 2][1])
    ]
    for number in around:
        root = tmp_path / "checkpoints"
        shutil.copytree(prepared, root)

        def work(announce, root=root, number=number):
            if save(staged(root, fast, deadly(number)), 2).ok:
                announce()

        assert die_in_a_child(work) == (True, False), (number, calls[number - 1])
        require_state(restored(root), 2 if number > published else 1)
        assert list(fast.iterdir()) == []
        shutil.rmtree(root)
    print(f"killed before and after each of {len(around)} calls to the stage")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_stage_that_fails_is_reported_and_the_save_succeeds_without_it(
    prepared, fast, tmp_path, code
):
    stage_calls = Watched()
    root = tmp_path / "checkpoints"
    shutil.copytree(prepared, root)
    assert save(staged(root, fast, stage_fs=stage_calls), 2).ok
    lost = []
    for number, (name, _) in enumerate(stage_calls.trace, 1):
        saving = staged(root, fast, stage_fs=failing_at(number, code))
        outcome = save(saving, 2 + number)
        assert list(fast.iterdir()) == []
        if name == "close":
            assert outcome.ok
            continue
        text = outcome.error or " ".join(outcome.notes)
        assert errno.errorcode[code] in text, (name, outcome)
        assert "checkpoint.stage_dir" in text
        if outcome.ok:
            assert text.endswith(f"; written directly to {root}")
            require_state(restored(root), 2 + number)
        else:
            lost.append(name)
            assert save(saving, 100 + number).ok
            require_state(restored(root), 100 + number)
            shutil.rmtree(root / f"step-{100 + number:09d}")
    # After training has changed the tensors, an unreadable staged file loses this save, and only this save.
    assert set(lost) == {"read_into"}
    assert {name for name, _ in stage_calls.trace} == {
        "free", "create_unnamed", "write", "read_into", "close",
    }  # fmt: skip


def test_a_full_stage_reports_the_missing_space(tmp_path, fast):
    class Small(FileSystem):
        def free(self, path):
            return 50_000

    outcome = save(staged(tmp_path / "checkpoints", fast, stage_fs=Small()), 1)
    assert outcome.ok
    assert "it needs 8" in outcome.notes[0]
    assert "50.0 kB are free; written directly to" in outcome.notes[0]


def test_a_staged_file_that_changed_is_not_committed(tmp_path, fast):
    class Rotten(FileSystem):
        def read_into(self, descriptor, view, position):
            count = super().read_into(descriptor, view, position)
            if position:
                view[count // 2] ^= 4
            return count

    outcome = save(staged(tmp_path / "checkpoints", fast, stage_fs=Rotten()), 1)
    assert not outcome.ok
    assert f"{fast}: the staged save (checkpoint.stage_dir) reads back with other content" in (
        outcome.error
    )
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_stage_without_unnamed_files_and_direct_io_works(tmp_path, fast, monkeypatch):
    refused = []
    genuine = os.open

    def poor(path, flags, *rest, **more):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append("unnamed")
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if fast in Path(path).parents and flags & os.O_DIRECT:
            refused.append("direct")
            os.close(genuine(path, flags & ~os.O_DIRECT, *rest, **more))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return genuine(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", poor)
    outcome = save(staged(tmp_path / "checkpoints", fast), 1)
    assert outcome.ok
    assert outcome.notes == ()
    assert refused == ["unnamed", "direct", "unnamed"]
    assert list(fast.iterdir()) == []
    require_state(restored(tmp_path / "checkpoints"), 1)
