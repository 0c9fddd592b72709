"""Every system call of a save, a prune and a sweep is a place to die at, or to be refused at."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.checkpoint.errors import CheckpointError
from hpcrun.checkpoint.filesystem import FileSystem
from hpcrun.checkpoint.store import CheckpointStore

from .faults import TornWrite, Watched, content, deadly, failing_at, save


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Two commits, and what an incarnation left that died in its third save."""
    root = tmp_path_factory.mktemp("prepared") / "checkpoints"
    store = CheckpointStore(root, "7-0", patience=0)
    save(store, 1)
    save(store, 2)
    draft = store.begin(3)
    with store.open_file(draft, "shared.pt") as stream:
        stream.write(b"unfinished")
    return root


def copied(prepared: Path, root: Path) -> Path:
    shutil.copytree(prepared, root)
    return root


def an_interval(root: Path, fs: FileSystem, announce: Callable[[], None] = lambda: None) -> None:
    """What a run does from one checkpoint to the next: sweep, save, prune."""
    store = CheckpointStore(root, "7-1", fs=fs, patience=0)
    store.sweep()
    save(store, 3)
    announce()
    store.prune(2)


@pytest.fixture
def calls(prepared, tmp_path) -> list[tuple[str, str]]:
    """The system calls of one undisturbed interval, in order: name and what it was called on."""
    watched = Watched()
    an_interval(copied(prepared, tmp_path / "counted"), watched)
    return watched.trace


def require_sound(root: Path, newest: set[int]) -> None:
    """Whatever is listed is whole, the newest is one of ``newest``, and work goes on from there."""
    store = CheckpointStore(root, "7-2", patience=0)
    manifest = store.newest_valid()
    assert manifest is not None
    assert manifest.step in newest
    for step in store.steps():
        store.check(step)
        for name, data in content(step).items():
            assert (store.path(step) / name).read_bytes() == data
    an_interval(root, FileSystem())
    store.sweep()
    assert store.steps() == [3, 2]
    assert sorted(entry.name for entry in root.iterdir()) == ["step-000000002", "step-000000003"]


def die_in_a_child(work: Callable[[Callable[[], None]], None]) -> tuple[bool, bool]:
    """Run ``work`` in a child; returns whether it was killed, and whether it announced its commit."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(lambda: os.write(writer, b"!") and None)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        announced = pipe.read() == b"!"
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, announced


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_call_leaves_a_valid_state_and_loses_nothing_announced(
    prepared, calls, tmp_path, moment
):
    announcements = 0
    for number in range(1, len(calls) + 1):
        root = copied(prepared, tmp_path / f"killed-{number}")
        killed, announced = die_in_a_child(
            lambda say, root=root, number=number: an_interval(root, deadly(number, moment), say)
        )
        assert killed
        announcements += announced
        require_sound(root, {3} if announced else {2, 3})
    assert 0 < announcements < len(calls)
    print(f"killed {moment} each of {len(calls)} calls")


def test_a_kill_in_the_middle_of_any_write_leaves_the_checkpoint_before(prepared, calls, tmp_path):
    writes = sum(name == "write" for name, _ in calls)
    assert writes >= 3
    for number in range(1, writes + 1):
        root = copied(prepared, tmp_path / f"torn-{number}")
        killed, announced = die_in_a_child(
            lambda say, root=root, number=number: an_interval(root, TornWrite(number), say)
        )
        assert killed
        assert not announced
        require_sound(root, {2})


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_refusal_at_any_call_is_reported_and_leaves_a_valid_state(
    prepared, calls, tmp_path, code
):
    commit_ends = calls.index(("rename", "step-000000003.tmp-7-1 -> step-000000003")) + 4
    assert calls[commit_ends - 3 : commit_ends] == [
        ("open_directory", "counted"),
        ("fsync", "counted"),
        ("close", "counted"),
    ]
    reports = []
    for number in range(1, len(calls) + 1):
        root = copied(prepared, tmp_path / f"refused-{number}")
        fs = failing_at(number, code)
        try:
            an_interval(root, fs)
        except CheckpointError as error:
            reports.append(str(error))
        else:
            # While pruning, a checkpoint that cannot be read is not counted as kept, and stays.
            assert number > commit_ends
        require_sound(root, {2, 3})
    assert commit_ends <= len(reports)
    assert all(errno.errorcode[code] in text and str(tmp_path) in text for text in reports)
    print(f"{errno.errorcode[code]} at each of {len(calls)} calls, {len(reports)} reported")


def test_a_refused_save_can_be_abandoned_and_made_again_by_the_same_owner(tmp_path):
    watched = Watched()
    save(CheckpointStore(tmp_path / "counted", "7-0", fs=watched), 1)
    for number in range(1, len(watched.trace) + 1):
        root = tmp_path / f"again-{number}"
        store = CheckpointStore(root, "7-0", fs=failing_at(number, errno.EIO), patience=0)
        try:
            save(store, 1)
        except CheckpointError:
            store.abandon(root / "step-000000001.tmp-7-0")
        save(store, 1)
        store.check(1)
        assert [entry.name for entry in root.iterdir()] == ["step-000000001"]


def test_everything_is_durable_before_the_rename_and_the_rename_before_anything_goes(calls):
    trace = calls
    publish = trace.index(("rename", "step-000000003.tmp-7-1 -> step-000000003"))
    for name in ("shared.pt", "rank-00000.pt", "manifest.json"):
        last_write = max(i for i, call in enumerate(trace) if call == ("write", name))
        assert last_write < trace.index(("fsync", name)) < publish
    assert trace[publish - 2 :: -1].index(("fsync", "step-000000003.tmp-7-1")) == 0
    assert trace.index(("fsync", "manifest.json")) < publish - 2
    away = next(
        i
        for i, (name, what) in enumerate(trace)
        if name == "rename" and ".trash-step-000000001" in what
    )
    assert ("fsync", "counted") in trace[publish:away]
    removed = next(i for i, (name, _) in enumerate(trace) if name == "unlink" and i > away)
    assert ("fsync", "counted") in trace[away:removed]
