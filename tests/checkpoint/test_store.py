"""The store: concurrent attempts, a full disk, and retention."""

import contextlib
import errno
import os
import re
import stat

import pytest

from hpcrun.cli.commands.verify import verify
from hpcrun.storage.disk import FileSystem
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.retention import Retention, pruning
from hpcrun.storage.store import CheckpointStore

from . import single_rank
from .faults import content, save


def names(root):
    """Return all names in ``root``, also hidden ones."""
    return sorted(entry.name for entry in root.iterdir())


def test_steps_are_listed_newest_first_and_nothing_else_is_listed(store):
    assert store.steps() == []
    assert store.newest_valid() is None
    for step in (100, 9, 1_234_567_890):
        save(store, step)
    store.begin(200)
    for name in ("step-5", "latest", "step-000000007.bak"):
        (store.root / name).mkdir()
    assert store.steps() == [1_234_567_890, 100, 9]


def test_files_and_folders_are_private_to_the_owner(store):
    path = save(store, 1)
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_short_writes_of_the_system_do_not_matter(root):
    class Sluggish(FileSystem):
        def write(self, descriptor, data):
            return super().write(descriptor, data[: max(1, len(data) // 3)])

    store = CheckpointStore(root, "7-0", fs=Sluggish(), patience=0)
    path = save(store, 1)
    store.check(1)
    assert {name: (path / name).read_bytes() for name in content(1)} == content(1)


def test_a_file_shorter_than_its_record_is_not_committed(store):
    draft = store.begin(1)
    with store.open_file(draft, "shared.pt") as stream:
        stream.write(b"content")
    (draft / "shared.pt").write_bytes(b"cont")
    with pytest.raises(CheckpointError, match="has 4 bytes, but 7 were written"):
        store.commit(draft, 1, [stream.record], 1, {}, lambda: None)
    assert store.steps() == []


def test_the_first_of_two_commits_of_a_step_is_kept(root):
    old, new = CheckpointStore(root, "7-0", patience=0), CheckpointStore(root, "7-1", patience=0)
    drafts = [old.begin(5), new.begin(5)]
    records = []
    for store, draft in zip((old, new), drafts, strict=True):
        with store.open_file(draft, "shared.pt") as stream:
            stream.write(b"state")
        records.append(stream.record)
    new.commit(drafts[1], 5, records[1:], 1, {}, lambda: None)
    assert old.commit(drafts[0], 5, records[:1], 1, {}, lambda: None) == old.path(5)
    assert old.manifest(5).owner == "7-1"
    assert names(root) == ["step-000000005"]


def test_attempts_that_save_and_prune_concurrently_leave_only_valid_checkpoints(root):
    children = []
    for restart in range(3):
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(CheckpointError):
                store = CheckpointStore(root, f"7-{restart}", patience=0)
                for step in range(1, 9):
                    save(store, step)
                    if restart == 0:
                        store.prune(3)
                status = 0
            os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    store = CheckpointStore(root, "7-9", patience=0)
    assert store.steps()[:3] == [8, 7, 6]
    for step in store.steps():
        store.check(step)
    assert not [name for name in names(root) if ".tmp-" in name]


def test_prune_keeps_the_newest_and_the_protected(store):
    for step in range(1, 7):
        save(store, step)
    assert store.prune(2, protect=[3]) == [1, 2, 4]
    assert store.steps() == [6, 5, 3]
    assert names(store.root) == ["step-000000003", "step-000000005", "step-000000006"]
    with pytest.raises(CheckpointError, match="at least one"):
        store.prune(0)


def test_sweep_removes_every_leftover_and_follows_no_link(root):
    dead, living = CheckpointStore(root, "7-0"), CheckpointStore(root, "7-1")
    save(dead, 1)
    with dead.open_file(dead.begin(2), "shared.pt") as stream:
        stream.write(b"half")
    (root / ".trash-step-000000000-7-0-aa" / "deep").mkdir(parents=True)
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "precious").write_text("stays")
    (root / "step-000000003.tmp-7-0").symlink_to(outside)
    living.begin(2)
    (root / "notes.txt").write_text("mine")
    assert living.sweep() == [
        ".trash-step-000000000-7-0-aa",
        "step-000000002.tmp-7-0",
        "step-000000002.tmp-7-1",
        "step-000000003.tmp-7-0",
    ]
    assert names(root) == ["notes.txt", "step-000000001"]
    assert (outside / "precious").read_text() == "stays"


@pytest.mark.parametrize("owner", ["", "../x", "a/b", "a b", "-x", "a\n"])
def test_an_owner_that_could_leave_the_folder_is_refused(root, owner):
    with pytest.raises(CheckpointError, match="not a valid owner"):
        CheckpointStore(root, owner)


def test_a_damaged_checkpoint_is_not_kept_as_the_best(root):
    store = CheckpointStore(root, "7-0", patience=0)
    after_commit = pruning(store, Retention(keep=1, best=1, metric="step"))
    for step in (1, 2, 3):
        save(store, step)
    file = store.path(1) / "shared.pt"
    file.write_bytes(file.read_bytes()[:-1])
    after_commit(3)
    assert store.steps() == [3, 2, 1]  # the newest, the best valid one, and the damaged one
    with pytest.raises(CheckpointError, match="keep=0: at least one"):
        Retention(keep=0)


class Network(FileSystem):
    """A file system that calls the files of a removed folder stale, as NFS does."""

    def open(self, path):
        try:
            return super().open(path)
        except FileNotFoundError:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from None


@pytest.mark.parametrize("fs", [FileSystem(), Network()])
def test_a_checkpoint_pruned_during_its_restore_leads_to_the_next(root, fs):
    training = single_rank.engine(root, "7-0", keep=1)

    def prune(entries, skeleton):
        if training.store.steps() == [1]:
            assert single_rank.save(training, 2).ok
        return {}

    assert single_rank.save(training, 1).ok
    reader = single_rank.engine(root, "8-0", fs)
    single_rank.require_state(reader.restore(prune), 2)
    assert single_rank.save(reader, 3).ok
    assert names(root) == ["step-000000002", "step-000000003"]


def test_a_step_pruned_during_a_verification_is_no_damage(root):
    class Pruning(FileSystem):
        def open(self, path):
            if path.name == "rank-00000.pt" and training.steps() == [2, 1]:
                training.prune(1)
            return super().open(path)

    training, reported = CheckpointStore(root, "7-0"), []
    for step in (1, 2):
        save(training, step)
    reading = CheckpointStore(root, "8-0", fs=Pruning(), patience=0)
    assert verify(reading, [1, 2], lambda *found: reported.append(found[:2])) == []
    assert reported == [(2, None)]
    with pytest.raises(CheckpointError, match="the training removed the step"):
        verify(reading, [1], lambda *found: reported.append(found[:2]))


def test_too_little_space_is_reported_with_figures_before_any_write(root):
    class Small(FileSystem):
        room = 50_000

        def free(self, path):
            return self.room

    fs = Small()
    saving = single_rank.engine(root, "7-0", fs)
    outcome = single_rank.save(saving, 1)
    assert not outcome.ok
    figures = re.search(
        r"a checkpoint needs (\S+) kB \((\S+) kB of tensors, (\S+) kB of other state\); 50\.0 kB are "
        r"free, (\S+) kB too little; free some space, or lower checkpoint\.keep$",
        outcome.error,
    )
    needs, tensors, other, missing = map(float, figures.groups())
    assert tensors == 80.1  # 20,000 numbers of four bytes, and seven of eight
    assert needs == pytest.approx(tensors + other, abs=0.11)
    assert missing == pytest.approx(needs - 50, abs=0.11)
    assert not root.exists()
    fs.room = 10**9
    assert single_rank.save(saving, 1).ok
    assert single_rank.save(saving, 2).bytes == pytest.approx(needs * 1000, rel=0.02)


def test_a_read_waits_for_a_name_that_appears_late(root):
    class Late(FileSystem):
        tries = 0

        def create(self, path):
            self.tries += 1
            if self.tries < 4:
                raise FileNotFoundError(2, os.strerror(2))
            return super().create(path)

    save(CheckpointStore(root, "7-0", fs=Late()), 1)
    with pytest.raises(CheckpointError, match="No such file"):
        save(CheckpointStore(root, "7-0", fs=Late(), patience=0), 2)
