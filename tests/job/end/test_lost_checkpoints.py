"""A start at step 0 is refused if checkpoints are gone."""

from pathlib import Path

import pytest

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, RunError, create
from hpcrun.storage.lost import require_none_lost
from tests.support.journal import record_event


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Return a run with step 12 in its log."""
    run = create(tmp_path / "a", "x", {})
    record_event(run, "saved", attempt=Attempt("7", 0), step=12)
    return run


def test_a_run_that_never_saved_has_lost_nothing(tmp_path: Path) -> None:
    require_none_lost(create(tmp_path / "a", "x", {}))


def test_a_run_with_lost_checkpoints_is_refused_with_a_check(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n5")
    with pytest.raises(RunError) as refused:
        require_none_lost(run, "runs/a")
    text = str(refused.value)
    assert text.startswith(f"{run.checkpoints}: step 12 was saved, and no checkpoint is left: n5 ")
    assert "if `ls` on another node shows step folders there, the mount of this node is at" in text
    assert text.endswith(
        f"put the folder back, or start a new run with `hpcrun submit -c {run.config} --name OTHER`"
    )
    run.checkpoints.rmdir()
    with pytest.raises(RunError, match="no checkpoint is left"):
        require_none_lost(run)


def test_a_run_that_lost_its_event_log_too_is_refused(run: RunDirectory) -> None:
    run.metrics.write_text('{"step": 10}\n{"step": 20}\n')
    run.events.unlink()
    with pytest.raises(
        RunError, match=r"metrics.jsonl has step 20, but events.jsonl has no start,"
    ):
        require_none_lost(run)
    # A run that crashed before its first save has lost nothing.
    record_event(run, "started", attempt=Attempt("7", 0), step=0)
    require_none_lost(run)
