"""Leftovers of killed submissions and deleted runs are removed, and block no name."""

import multiprocessing
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hpcrun.run import directory as leftover_folders
from hpcrun.run.directory import RunError, create, holds_only_logs
from hpcrun.run.endings import record_failure
from hpcrun.run.files import read_lines, write_json
from hpcrun.run.snapshot import take_snapshot
from hpcrun.run.streams import LineWriter


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _killed_in_the_middle(path: Path) -> None:
    leftover_folders.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    from hpcrun.run import directory

    directory.publish = leftover_folders.publish  # type: ignore[attr-defined]
    create(path, "x", {})


def test_folders_of_killed_submissions_are_removed_and_live_ones_stay(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        process = multiprocessing.get_context("fork").Process(
            target=_killed_in_the_middle, args=(tmp_path / name,)
        )
        process.start()
        process.join()
    # The second submission has removed the folder of the first.
    (left,) = names(tmp_path)
    assert left.startswith(".b.")
    mine = leftover_folders.make_staged(tmp_path / "mine")
    # From other hosts, and from versions without a maker file: only the age is known.
    young, old = (
        leftover_folders.make_staged(tmp_path / "y"),
        leftover_folders.make_staged(tmp_path / "o"),
    )
    for folder in (young, old):
        write_json(folder / ".maker", {"space": "elsewhere", "pid": 1})
    nameless = leftover_folders.make_staged(tmp_path / "n")
    (nameless / ".maker").unlink()
    for folder in (old, nameless):
        os.utime(folder, (0, 0))
    (tmp_path / ".mine.new").mkdir()
    create(tmp_path / "c", "x", {})
    assert names(tmp_path) == sorted([".mine.new", "c", mine.name, young.name])
    assert ".maker" not in names(tmp_path / "c")


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
        record_failure(run.attempt_logs("7", 0), 0, ValueError("x"), None)
    assert names(tmp_path) == []
    # They do not write into a new run of this name either.
    create(run.path, "y", {"created": 2})
    log.write({"step": 3})
    with pytest.raises(FileNotFoundError, match=r"gone|No such file"):
        log.flush()
    assert read_lines(run.metrics) == []


def husk(path: Path) -> Path:
    run = create(path, "x", {})
    folder = run.attempt_logs("7", 0)
    folder.mkdir(parents=True)
    (folder / "rank-00000.log").write_text("the end")
    run.metrics.write_text("{}\n")
    run.compile_cache.touch()
    file_of_second_gpu = run.compile_cache.with_name("compile-cache-1.bin")
    file_of_second_gpu.touch()
    for gone in (run.config, run.record):
        gone.unlink()
    run.checkpoints.rmdir()
    return path


def test_the_rest_of_a_deleted_run_blocks_no_name_and_no_snapshot_has_it(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    subprocess.run(["git", "init", "-q", str(code)], check=True)
    (code / "train.py").write_text("pass\n")
    husk(code / "old-runs" / "two")
    assert holds_only_logs(code / "old-runs" / "two")
    run = create(tmp_path / "runs" / "one", "x", {})
    snapshot, _ = take_snapshot(run, code)
    assert snapshot is not None
    assert [path.name for path in snapshot.root.rglob("*")] == ["train.py"]
    made = create(code / "old-runs" / "two", "y", {})
    assert made.exists()
    assert names(code / "old-runs") == ["two"]
    assert not made.metrics.exists()


@pytest.mark.parametrize("kept", ["config.yaml", "checkpoints/step-000000003", "notes.txt"])
def test_a_folder_with_other_files_is_not_taken_for_a_deleted_run(
    tmp_path: Path, kept: str
) -> None:
    path = husk(tmp_path / "a")
    (path / kept).parent.mkdir(exist_ok=True)
    (path / kept).mkdir()
    assert not holds_only_logs(path)
    with pytest.raises(RunError, match="is already taken by"):
        create(path, "x", {})
    assert (path / "metrics.jsonl").exists()


def test_an_empty_folder_and_a_link_are_not_taken_for_deleted_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(husk(tmp_path / "a"))
    assert [holds_only_logs(tmp_path / name) for name in ("empty", "link", "none")] == [False] * 3
