"""A crash or an error at every system call of a save, from cleanup to pruning."""

import errno
import shutil

import pytest
import torch

from hpcrun.storage.disk import FileSystem

from .faults import TornWrite, Watched, deadly, die_in_a_child, failing_at, failing_from
from .single_rank import engine, require_state, restored, save

PUBLISHED = ("rename", "step-000000003.tmp-7-1 -> step-000000003")


@pytest.fixture(autouse=True, scope="module")
def past_the_page_cache():
    """Write small files like large files, and use one thread, because children are forked here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kept, FileSystem.direct_from = FileSystem.direct_from, 0
    yield
    FileSystem.direct_from = kept
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a folder with two commits, and leftovers of an attempt that died in a save and in pruning."""
    root = tmp_path_factory.mktemp("prepared") / "checkpoints"
    saving = engine(root, "7-0")
    for step in (1, 2):
        assert save(saving, step).ok
    for name in ("step-000000003.tmp-7-0", ".trash-step-000000000-7-0-aa"):
        (root / name).mkdir()
        (root / name / "rank-00000.bin").write_bytes(b"half")
    return root


@pytest.fixture(scope="module")
def calls(prepared, tmp_path_factory):
    """Return the system calls of an undisturbed save in order: name and path."""
    root = tmp_path_factory.mktemp("counted") / "checkpoints"
    shutil.copytree(prepared, root)
    watched = Watched()
    assert save(engine(root, "7-1", watched), 3).ok
    return watched.trace


@pytest.fixture
def each_call(prepared, calls, tmp_path):
    """Yield fresh copies of ``prepared``, one per call of a save: its number and the folder."""

    def copies():
        root = tmp_path / "checkpoints"
        for number in range(1, len(calls) + 1):
            shutil.copytree(prepared, root)
            yield number, root
            shutil.rmtree(root)

    return copies


def require_sound(root, newest):
    """Assert that a restore gives the exact state of ``newest``, and that another attempt can continue."""
    require_state(restored(root), newest)
    assert save(engine(root, "7-2"), 4).ok
    require_nothing_left(root, 4)


def require_nothing_left(root, newest):
    """Assert that ``newest`` is valid, and that the folder has only committed checkpoints."""
    require_state(restored(root), newest)
    names = [entry.name for entry in root.iterdir()]
    assert all(name.startswith("step-0") and ".tmp-" not in name for name in names), names


def test_the_calls_of_a_save_are_cleanup_commit_and_pruning(calls):
    step = calls.index
    publish = step(PUBLISHED)
    for name in ("rank-00000.bin", "index.json", "manifest.json"):
        last_write = max(i for i, call in enumerate(calls) if call == ("write", name))
        assert last_write < step(("fsync", name)) < publish
    assert step(("fsync", "manifest.json")) < step(("fsync", "step-000000003.tmp-7-1")) < publish
    # Each attempt makes the folder durable: its creator may have died before.
    made = step(("make_directory", "checkpoints"))
    assert [name for name, _ in calls[made + 1 : made + 3]] == ["open_directory", "fsync"]
    swept = step(("remove_directory", "step-000000003.tmp-7-0"))
    assert swept < step(("make_directory", "step-000000003.tmp-7-1"))
    durable = publish + calls[publish:].index(("fsync", "checkpoints"))
    away = next(
        i for i, (name, what) in enumerate(calls)
        if name == "rename" and what.startswith("step-000000001 -> .trash-")
    )  # fmt: skip
    removed = next(i for i, (name, _) in enumerate(calls) if name == "unlink" and i > away)
    assert publish < durable < away
    assert ("fsync", "checkpoints") in calls[away:removed]


def test_a_kill_between_calls_leaves_the_old_or_new_commit(calls, each_call):
    published = calls.index(PUBLISHED) + 1
    for number, root in each_call():

        def work(announce, root=root, number=number):
            if save(engine(root, "7-1", deadly(number)), 3).ok:
                announce()

        assert die_in_a_child(work) == (True, False), (number, calls[number - 1])
        require_sound(root, 3 if number > published else 2)
    print(f"killed before each of {len(calls)} calls of a save with its sweep and its pruning")


def test_a_kill_in_any_write_leaves_the_commit_before(prepared, calls, tmp_path):
    writes = sum(name == "write" for name, _ in calls)
    assert writes >= 4
    for number in range(1, writes + 1):
        root = tmp_path / f"torn-{number}"
        shutil.copytree(prepared, root)

        def work(announce, root=root, number=number):
            if save(engine(root, "7-1", TornWrite(number)), 3).ok:
                announce()

        assert die_in_a_child(work) == (True, False), number
        require_sound(root, 2)
    print(f"killed in the middle of each of {writes} writes")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_an_error_at_any_call_is_reported_then_saving_works(calls, each_call, code):
    published = calls.index(PUBLISHED) + 1
    # Leftovers that cannot be removed do not prevent a save.
    swept = [name for name, _ in calls].index("free")
    assert swept > 5
    told = 0
    for number, root in each_call():
        saving = engine(root, "7-1", failing_at(number, code))
        outcome = save(saving, 3)
        where = (number, calls[number - 1], outcome)
        text = outcome.error or " ".join(outcome.notes)
        told += errno.errorcode[code] in text
        # An unreadable checkpoint does not count as kept during pruning, and stays.
        assert errno.errorcode[code] in text or number > published + 3, where
        assert outcome.ok == (number <= swept or number > published + 3), where
        require_state(restored(root), 3 if outcome.ok or number > published else 2)
        # The same step again, as at a stop right after it.
        step = 4 if outcome.ok else 3
        assert save(saving, step).ok, where
        require_nothing_left(root, step)
    print(f"{errno.errorcode[code]} at each of {len(calls)} calls: {told} told")


def test_a_file_system_gone_from_any_call_leaves_a_state(calls, each_call):
    published = calls.index(PUBLISHED) + 1
    for number, root in each_call():
        outcome = save(engine(root, "7-1", failing_from(number, errno.ENOTCONN)), 3)
        assert outcome.ok == (number > published + 3), (number, outcome)
        require_sound(root, 3 if number > published else 2)
    print(f"gone from each of {len(calls)} calls on")
