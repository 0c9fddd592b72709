"""A start at step 0 is refused if checkpoints are gone, but not if a node only shows them late."""

from pathlib import Path

import pytest

from hpcrun.job.ownership import require_none_lost, steps_listed_anew
from hpcrun.run.directory import RunDirectory, RunError, create
from hpcrun.run.events import Attempt, record_event


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Return a run with step 12 in its log."""
    run = create(tmp_path / "a", "x", {})
    record_event(run, "saved", attempt=Attempt("7", 0), step=12)
    return run


def test_a_run_that_never_saved_has_lost_nothing(tmp_path: Path) -> None:
    assert not require_none_lost(create(tmp_path / "a", "x", {}))


def test_a_run_whose_checkpoints_are_gone_is_refused_with_the_way_to_check(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n5")
    with pytest.raises(RunError) as refused:
        require_none_lost(run, "runs/a", pause=0.0)
    text = str(refused.value)
    assert text.startswith(f"{run.checkpoints}: step 12 was saved, and no checkpoint is left: n5 ")
    assert "if `ls` on another node shows step folders there, the mount of this node is at" in text
    assert text.endswith(
        "put the folder back, or start from step 0 with `hpcrun resume runs/a --from-scratch`"
    )
    run.checkpoints.rmdir()
    with pytest.raises(RunError, match="no checkpoint is left"):
        require_none_lost(run, pause=0.0)


def test_a_run_that_lost_its_event_log_too_is_refused(run: RunDirectory) -> None:
    run.metrics.write_text('{"step": 10}\n{"step": 20}\n')
    run.events.unlink()
    with pytest.raises(
        RunError, match=r"metrics.jsonl has step 20, but events.jsonl has no start,"
    ):
        require_none_lost(run, pause=0.0)
    # A run that crashed before its first save has lost nothing.
    record_event(run, "started", attempt=Attempt("7", 0), step=0)
    assert not require_none_lost(run, pause=0.0)


def test_checkpoints_that_show_late_are_found_by_the_second_look(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(_: float) -> None:
        (run.checkpoints / "step-000000012").mkdir()

    monkeypatch.setattr("hpcrun.job.ownership.time.sleep", show)
    assert require_none_lost(run)


def test_a_second_look_changes_the_folder_first_and_leaves_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client asks the server again after the client itself has changed the folder."""
    for step in (4, 12):
        (run.checkpoints / f"step-{step:09d}").mkdir()
    before = sorted(path.name for path in run.path.rglob("*"))
    changed = [folder.stat().st_mtime_ns for folder in (run.path, run.checkpoints)]
    assert steps_listed_anew(run) == [12, 4]
    assert sorted(path.name for path in run.path.rglob("*")) == before
    assert [folder.stat().st_mtime_ns for folder in (run.path, run.checkpoints)] > changed


def test_a_folder_that_cannot_be_listed_does_not_count_as_empty(run: RunDirectory) -> None:
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to(run.checkpoints)
    with pytest.raises(OSError, match="symbolic links"):
        require_none_lost(run, pause=0.0)
