"""Making, finding and owning a run directory."""

import errno
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import pytest

from hpcrun.run import record as owner
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunError, create, find, refuse_foreign
from hpcrun.run.endings import record_failure
from hpcrun.run.files import read_lines
from hpcrun.run.record import OwnedByAnotherAttempt, claim, require_ownership
from hpcrun.run.streams import LineWriter


def test_a_run_directory_is_made_whole_and_private(tmp_path: Path) -> None:
    run = create(tmp_path / "runs" / "a", "seed: 1\n", {"created": 1}, "diff")
    assert run.exists()
    assert run.checkpoints.is_dir()
    assert run.diff.read_text() == "diff"
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in run.path.parent.iterdir()] == ["a"]


def test_a_taken_name_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    create(tmp_path / "a", "one", {})
    with pytest.raises(RunError, match=r"exists already.*--name.*resume .*/a`"):
        create(tmp_path / "a", "two", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "config.yaml").read_text().startswith("one")


def _create(path: Path, queue: "multiprocessing.Queue[str]") -> None:
    try:
        create(path, str(os.getpid()), {})
        queue.put("made")
    except RunError:
        queue.put("refused")


def test_of_simultaneous_submissions_exactly_one_makes_the_run(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_create, args=(tmp_path / "a", queue)) for _ in range(6)]
    for worker in workers:
        worker.start()
    answers = sorted(queue.get(timeout=300) for _ in workers)
    for worker in workers:
        worker.join()
    assert answers == ["made"] + ["refused"] * 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def _killed_before_the_rename(path: Path) -> None:
    Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    create(path, "x", {})


def test_the_next_submission_removes_a_killed_submission_s_folder(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_killed_before_the_rename, args=(tmp_path / "a",)
    )
    process.start()
    process.join()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".a.")
    create(tmp_path / "a", "x", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_ranks_that_end_do_not_recreate_a_deleted_run(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "x", {})
    log = LineWriter(run.metrics)
    log.write({"step": 1})
    log.flush()
    shutil.rmtree(run.path)
    log.write({"step": 2})
    with pytest.raises(FileNotFoundError, match=r"gone|No such file"):
        log.flush()
    with pytest.raises(FileNotFoundError):
        record_failure(run.attempt_logs(Attempt("7", 0)), 0, ValueError("x"), None)
    assert [*tmp_path.iterdir()] == []
    # They do not write into a new run of this name either.
    create(run.path, "y", {"created": 2})
    log.write({"step": 3})
    with pytest.raises(FileNotFoundError, match=r"gone|No such file"):
        log.flush()
    assert read_lines(run.metrics) == []


def test_a_run_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "x", {})
    assert find("a", tmp_path).path == run.path
    assert find(str(tmp_path / "a"), tmp_path / "elsewhere").path == run.path
    with pytest.raises(RunError, match=r"b: no such run in .*; available: a"):
        find("b", tmp_path)


def test_a_run_that_others_control_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "a", "x", {})
    refuse_foreign(run)
    run.path.chmod(0o707)
    with pytest.raises(RunError, match="chmod o-w"):
        find("a", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    # The folder of another user takes no new file.
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda dir: Path(dir, "closed", "x").read_bytes()
    )
    with pytest.raises(RunError, match=rf"{run.path}: belongs to .*would run as you.*`cp -r`"):
        refuse_foreign(run)


def test_an_earlier_and_an_equal_attempt_are_superseded(tmp_path: Path) -> None:
    run, attempt = create(tmp_path / "a", "x", {}), Attempt("7", 1)
    claim(run, Attempt("7", 0))
    claim(run, attempt)
    require_ownership(run, attempt)
    with pytest.raises(OwnedByAnotherAttempt):
        require_ownership(run, Attempt("7", 0))
    # Two clusters may use the same job numbers.
    child = os.fork()
    if child == 0:
        owner.INCARNATION = "of another process"
        os.environ["SLURM_CLUSTER_NAME"] = "elsewhere"
        claim(run, attempt)
        require_ownership(run, attempt)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(
        OwnedByAnotherAttempt, match=r"a: 7-1 of cluster elsewhere \(rank 0 on .*\) owns this run"
    ):
        require_ownership(run, attempt)


def test_an_owner_file_unreadable_for_a_moment_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mine = create(tmp_path / "a", "x", {}), Attempt("7", 0)
    claim(run, mine)
    aside = tmp_path / "aside"
    for unreadable in (False, True):
        run.owner.rename(aside)
        if unreadable:
            run.owner.mkdir()
        back = threading.Timer(0.5, put_back, (aside, run.owner))
        back.start()
        require_ownership(run, mine, patience=60.0, pause=0.05)
        back.join()
    stale = iter([OSError(errno.ESTALE, "stale"), OSError(errno.ESTALE, "stale")])
    read_text = Path.read_text

    def read(path: Path) -> str:
        for error in stale:
            raise error
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", read)
    require_ownership(run, mine, patience=0.0)


def put_back(aside: Path, owner: Path) -> None:
    if owner.is_dir():
        owner.rmdir()
    aside.rename(owner)


def test_an_unreadable_owner_file_raises_and_a_missing_supersedes(
    tmp_path: Path,
) -> None:
    run, mine = create(tmp_path / "a", "x", {}), Attempt("7", 0)
    with pytest.raises(OwnedByAnotherAttempt, match=r"owner\.json is gone"):
        require_ownership(run, mine, patience=0.3, pause=0.05)
    run.owner.mkdir()
    with pytest.raises(IsADirectoryError):
        require_ownership(run, mine, patience=0.3, pause=0.05)
