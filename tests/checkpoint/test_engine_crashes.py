"""Every system call of a whole save, from the sweep to the pruning, is a place to die at or to fail at."""

import errno
import os
import random
import shutil
import signal

import pytest
import torch

from hpcrun.checkpoint import share
from hpcrun.checkpoint.engine import CheckpointEngine
from hpcrun.checkpoint.errors import CheckpointError, DamagedCheckpoint
from hpcrun.checkpoint.filesystem import FileSystem
from hpcrun.checkpoint.reading import StoreReader
from hpcrun.checkpoint.retention import Retention, tidying
from hpcrun.checkpoint.store import CheckpointStore

from .faults import TornWrite, Watched, deadly, failing_at

SIZE = 20_000


@pytest.fixture(autouse=True, scope="module")
def past_the_page_cache():
    """Small files too are written as large ones are. One thread: children are forked here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kept, share._DIRECT_FROM = share._DIRECT_FROM, 0
    yield
    share._DIRECT_FROM = kept
    torch.set_num_threads(threads)


def nothing(names):
    return {}


def fits_not(names):
    return {"model": {"b": torch.zeros(3)}}


def state(step):
    return {
        "model": {"w": torch.full((SIZE,), float(step)), "b": torch.arange(7) + step},
        "plain": {"step": step, "text": "ü"},
    }


def engine(root, owner, fs=None, keep=2):
    store = CheckpointStore(root, owner, fs=fs or FileSystem(), patience=0)
    return CheckpointEngine(
        store, rank=0, world_size=1, group=None, still_mine=lambda: None,
        tidy=tidying(store, Retention(keep)),
    )  # fmt: skip


def save(saving, step):
    return saving.save(step, state(step), {"rank": 0}, {"step": step})


def restored(root, owner="7-9"):
    return engine(root, owner).restore(nothing)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two commits, and what an incarnation left that died in its third save and in its pruning."""
    root = tmp_path_factory.mktemp("prepared") / "checkpoints"
    saving = engine(root, "7-0")
    for step in (1, 2):
        assert save(saving, step).ok
    draft = root / "step-000000003.tmp-7-0"
    draft.mkdir()
    (draft / "rank-00000.bin").write_bytes(b"half")
    trash = root / ".trash-step-000000000-7-0-aa"
    trash.mkdir()
    (trash / "rank-00000.bin").write_bytes(b"half")
    return root


@pytest.fixture(scope="module")
def calls(prepared, tmp_path_factory):
    """The system calls of one undisturbed save, in order."""
    root = tmp_path_factory.mktemp("counted") / "checkpoints"
    shutil.copytree(prepared, root)
    watched = Watched()
    assert save(engine(root, "7-1", watched), 3).ok
    return watched.trace


def require_sound(root, newest):
    """A restore gives a valid state no older than announced, whole to the last element, and work goes on."""
    found = restored(root)
    assert found.step in newest
    for name, value in state(found.step)["model"].items():
        assert torch.equal(found.shared["model"][name], value)
    assert found.shared["plain"] == {"step": found.step, "text": "ü"}
    assert save(engine(root, "7-2"), 4).ok
    assert restored(root).step == 4
    leftovers = [entry.name for entry in root.iterdir() if not entry.name.startswith("step-0")]
    assert not leftovers
    assert not [entry for entry in root.iterdir() if ".tmp-" in entry.name]


def die(root, fs):
    """Save step 3 in a child; returns whether it was killed, and whether it announced the commit."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if save(engine(root, "7-1", fs), 3).ok:
                os.write(writer, b"!")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        announced = pipe.read() == b"!"
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, announced


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_at_any_call_of_a_save_leaves_the_commit_before_or_the_new_one(
    prepared, calls, tmp_path, moment
):
    published = calls.index(("rename", "step-000000003.tmp-7-1 -> step-000000003")) + 1
    for number in range(1, len(calls) + 1):
        root = tmp_path / "killed"
        shutil.copytree(prepared, root)
        killed, announced = die(root, deadly(number, moment))
        assert killed
        assert not announced
        there = number > published or (number == published and moment == "after")
        require_sound(root, {3} if there else {2})
        shutil.rmtree(root)
    print(f"killed {moment} each of {len(calls)} calls of a save with sweep and prune")


def test_a_kill_in_the_middle_of_any_write_leaves_the_commit_before(prepared, calls, tmp_path):
    writes = sum(name == "write" for name, _ in calls)
    assert writes >= 4
    for number in range(1, writes + 1):
        root = tmp_path / "torn"
        shutil.copytree(prepared, root)
        assert die(root, TornWrite(number)) == (True, False), (
            number,
            [c for c in calls if c[0] in ("write", "append", "create_direct")],
        )
        require_sound(root, {2})
        shutil.rmtree(root)
    print(f"killed in the middle of each of {writes} writes")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_refusal_at_any_call_is_told_and_the_next_interval_saves(prepared, calls, tmp_path, code):
    told = 0
    for number in range(1, len(calls) + 1):
        root = tmp_path / "refused"
        shutil.copytree(prepared, root)
        saving = engine(root, "7-1", failing_at(number, code))
        outcome = save(saving, 3)
        assert outcome.ok or errno.errorcode[code] in outcome.error
        told += not outcome.ok or bool(outcome.notes)
        found = restored(root)
        assert found.step == 3 if outcome.ok else found.step in (2, 3)
        again = save(saving, 4)
        assert again.ok, again.error
        require_sound(root, {4})
        shutil.rmtree(root)
    print(f"{errno.errorcode[code]} at each of {len(calls)} calls: {told} told")


@pytest.mark.slow
def test_a_thousand_flipped_bits_and_cut_ends_are_all_noticed_and_the_run_falls_back(tmp_path):
    root = tmp_path / "checkpoints"
    saving = engine(root, "7-0")
    small = {"model": {"w": torch.rand(300), "b": torch.arange(9)}, "plain": {"text": "ü" * 50}}
    for step in (1, 2):
        assert saving.save(step, small, {"n": torch.rand(20)}, {"step": step}).ok
    draw = random.Random("a thousand")
    files = sorted((root / "step-000000002").iterdir())
    assert len(files) == 3
    whole = {file: file.read_bytes() for file in files}
    weights = [len(content) for content in whole.values()]
    hits = dict.fromkeys((file.name for file in files), 0)
    for trial in range(1000):
        (file,) = draw.choices(files, weights if trial % 2 else None)
        content = bytearray(whole[file])
        if trial % 4 == 3:
            del content[draw.randrange(len(content)) :]
        else:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
        with pytest.raises(DamagedCheckpoint, match=file.name.replace(".", r"\.")):
            CheckpointStore(root, "7-8", patience=0).check(2)
        found = restored(root)
        assert found.step == 1
        assert file.name in found.notes[0]
        hits[file.name] += 1
        file.write_bytes(whole[file])
    assert restored(root).step == 2
    print(f"1000 of 1000 noticed: {hits}")


def test_a_disk_with_too_little_room_is_told_before_anything_is_written(tmp_path):
    class Small(FileSystem):
        def free(self, path):
            return 50_000

    watched = Small()
    outcome = save(engine(tmp_path / "checkpoints", "7-0", watched), 1)
    assert not outcome.ok
    assert "a checkpoint needs 8" in outcome.error
    assert "50.0 kB are free, 3" in outcome.error
    assert not (tmp_path / "checkpoints").exists()


def test_a_stale_handle_is_opened_again_while_reading(tmp_path):
    class Restarted(FileSystem):
        left = 3

        def read_into(self, descriptor, view, position):
            if self.left:
                self.left -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return super().read_into(descriptor, view[:30_000], position)

    root = tmp_path / "checkpoints"
    assert save(engine(root, "7-0"), 1).ok
    fs = Restarted()
    store = CheckpointStore(root, "7-1", fs=fs, patience=2)
    reader = StoreReader(store, 1)
    into = {"model/w": reader.empty("model/w")}
    reader.load(into)
    assert fs.left == 0
    assert torch.equal(into["model/w"], state(1)["model"]["w"])
    fs.left = 10**9
    hopeless = CheckpointStore(root, "7-1", fs=fs, patience=0.1)
    with pytest.raises(DamagedCheckpoint, match="ESTALE"):
        StoreReader(hopeless, 1).load(into)


def test_tensors_of_another_shape_are_refused_and_not_taken_for_damage(tmp_path):
    root = tmp_path / "checkpoints"
    assert save(engine(root, "7-0"), 1).ok
    with pytest.raises(CheckpointError, match=r"step 1: rank 0 .*: model/b: is \(7,\) there"):
        engine(root, "7-1").restore(fits_not)
