"""The lock in a file: stale and damaged locks, takeovers, and kills at each step."""

import json
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrun.drafts import process_space
from hpcrun.run.directory import RunDirectory, RunError, create
from hpcrun.run.record import SubmissionLock
from tests.support.kills import killed_at_each_step
from tests.support.training.forks import fork_ranks


def test_two_submissions_of_one_run_exclude_each_other(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "x", {})
    with (
        SubmissionLock(run),
        pytest.raises(RunError, match=r"another process is submitting this run \(this process\)"),
        SubmissionLock(run),
    ):
        pass
    with SubmissionLock(run):
        assert run.submitting.exists()

        def submit_too(_: int) -> None:
            with pytest.raises(RunError, match=rf"\(process {os.getppid()} on "):
                SubmissionLock(run).hold(here=0.1)

        assert fork_ranks(1, submit_too) == [0]
    assert not run.submitting.exists()


def test_a_lock_ends_with_its_object_not_with_a_fork(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "x", {})
    lock = SubmissionLock(run)
    lock.take()
    assert fork_ranks(1, lambda _: lock.release()) == [0]
    assert run.submitting.exists()
    newer = SubmissionLock(run)
    newer.take()
    lock.take()
    assert json.loads(run.submitting.read_text())["pid"] == os.getpid()
    newer.hold()
    with pytest.raises(RunError, match="this process"):
        lock.take()
    del newer
    assert not run.submitting.exists()


def test_a_kill_while_locking_blocks_no_process(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "x", {})
    ended = subprocess.Popen(["true"])
    ended.wait()
    for stale, alive in ((False, False), (True, False), (True, True)):
        for place in killed_at_each_step(lambda: SubmissionLock(run).hold()):
            if alive:  # The stale holder was only slow, and has released its lock.
                run.submitting.unlink(missing_ok=True)
            with SubmissionLock(run):
                held = json.loads(run.submitting.read_text())
            assert not [*run.path.glob("*submitting*")], place
            if stale:
                # The next child is killed while it takes over this lock of a dead process.
                token = f"{ended.pid:016x}"
                run.submitting.write_text(json.dumps(held | {"pid": ended.pid, "token": token}))


def change_lock(run: RunDirectory, **values: object) -> None:
    holder = json.loads(run.submitting.read_text())
    run.submitting.write_text(json.dumps(holder | values))


WHOLE = {"pid": 1, "space": process_space(), "token": "0" * 16, "job": None}
WRONG = {
    "pid": (None, "seven", "7", 7.5, True, 0, -1, 1 << 22 | 1, 10**30),
    "space": (None, ""),
    "token": (None, 7, "", "../../config.yaml", "0" * 300),
}
DAMAGED = [
    *("", "\0\1\xff", "process 7 on node1", "[]", "{}", '{"pid": 7, "spa', "[" * 100_000),
    *(json.dumps(WHOLE | {key: value}) for key, values in WRONG.items() for value in values),
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_lock_is_taken_over_at_once(tmp_path: Path, content: str) -> None:
    run = create(tmp_path / "a", "x", {})
    before = {*run.path.iterdir()}
    run.submitting.write_text(content, encoding="latin1")
    with SubmissionLock(run), pytest.raises(RunError, match="another process is submitting"):
        SubmissionLock(run).hold()
    assert {*run.path.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({"space": "another-host-1-2"}, False),
        ({"space": process_space().replace("-", "-0", 1)}, False),  # another boot or container
        ({"pid": 1}, False),
        ({"job": ["c/7", "0"], "space": "another-host-1-2"}, True),
        ({"job": ["c/7", "1"], "space": "another-host-1-2"}, False),  # another step of this start
        ({"job": ["d/7", "0"], "space": "another-host-1-2"}, False),  # of another cluster
    ],
)
def test_a_lock_ends_with_its_process_or_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], taken: bool
) -> None:
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "c")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = create(tmp_path / "a", "x", {})
    first, second = SubmissionLock(run), SubmissionLock(run)
    first.hold()
    change_lock(run, **change)
    for number in range(2):
        if taken or number:
            second.hold()
        else:
            with pytest.raises(RunError, match="another process is submitting this run"):
                second.hold()
        os.utime(run.submitting, (0, 0))
    second.release()
    assert not run.submitting.exists()


def test_one_of_several_takes_a_stale_lock_over(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "x", {})
    stale, locks = SubmissionLock(run), [SubmissionLock(run) for _ in range(8)]
    stale.hold()
    os.utime(run.submitting, (0, 0))
    ready = threading.Barrier(8)

    def take(lock: SubmissionLock) -> bool:
        ready.wait()
        try:
            lock.hold()
        except RunError:
            return False
        return True

    with ThreadPoolExecutor(8) as takers:
        assert sorted(takers.map(take, locks)) == [False] * 7 + [True]
    assert not list(run.path.glob(".submitting*"))


def test_a_lock_replaced_since_the_check_is_left_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "a", "x", {})
    first, second, late = SubmissionLock(run), SubmissionLock(run), SubmissionLock(run)
    first.hold()
    os.utime(run.submitting, (0, 0))
    link, taken = os.link, []

    def outrun(draft: Path, path: Path) -> None:
        """Let the second process take over before the late process makes its claim."""
        if path != run.submitting:
            monkeypatch.setattr(os, "link", link)
            second.hold()
            taken.append(run.submitting.read_text())
        link(draft, path)

    monkeypatch.setattr(os, "link", outrun)
    with pytest.raises(RunError):
        late.hold()
    assert taken == [run.submitting.read_text()]
    # The first holder is alive after all, and releases only its own lock.
    first.release()
    assert run.submitting.exists()
    second.release()
    assert not run.submitting.exists()


def test_the_file_server_s_clock_gives_a_lock_s_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "a", "x", {})
    now = time.time()
    with SubmissionLock(run):
        # This host's clock is an hour ahead of the server's.
        monkeypatch.setattr(time, "time", lambda: now + 3600)
        with pytest.raises(RunError, match="another process is submitting this run"):
            SubmissionLock(run).hold()


def test_a_holder_touches_its_lock_regularly(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "x", {})
    with SubmissionLock(run, beat=0.05):
        os.utime(run.submitting, (0, 0))
        deadline = time.monotonic() + 300
        while run.submitting.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
