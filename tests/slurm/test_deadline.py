"""The end time of the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.errors import ClusterError
from hpcrun.ranks.deadline import asked_end, given_end, query_end_time

Recorded = Callable[[str], dict[str, str]]


def unasked(job: str) -> float | None:
    raise AssertionError(f"Slurm was asked about {job}")


def test_an_older_slurm_is_asked_by_the_array_task(recorded_env: Recorded) -> None:
    environ = recorded_env("gpus-per-task")
    # Since 23.02 the job's environment contains it.
    environ.pop("SLURM_JOB_END_TIME", None)
    assert given_end(environ) is None
    assert asked_end(environ, lambda job: {"3_1": 5.0}[job]) == 5.0


def test_outside_slurm_no_scheduler_is_asked() -> None:
    assert asked_end({}, unasked) is None
    assert asked_end({"SLURM_JOB_ID": "7", "HPCRUN_LOCAL_CLUSTER": "1"}, unasked) is None


@pytest.mark.parametrize("value", ["tomorrow", "nan", "-1", "2026-11-21T09:32:02"])
def test_a_malformed_end_time_is_refused_by_name(value: str) -> None:
    with pytest.raises(ClusterError, match="SLURM_JOB_END_TIME"):
        given_end({"SLURM_JOB_END_TIME": value})


@pytest.fixture
def squeue_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a squeue in front of PATH that prints a recorded answer."""

    def install(text: str) -> None:
        (tmp_path / "answer").write_text(text)
        script = tmp_path / "squeue"
        script.write_text(f"#!/bin/sh\nexec /bin/cat '{tmp_path}/answer'\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


def test_the_controllers_answer_is_read(
    squeue_prints: Callable[[str], None], recorded: Callable[[str], str]
) -> None:
    squeue_prints(recorded("22.05/squeue.txt"))
    assert query_end_time("30") == 1795347511.0
    assert query_end_time("99") is None


def test_the_guess_for_a_waiting_job_is_no_end_time(
    squeue_prints: Callable[[str], None], recorded: Callable[[str], str]
) -> None:
    squeue_prints(recorded("22.05/squeue.txt"))
    assert query_end_time("36") is None


def test_a_silent_controller_is_no_end_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_end_time("7") is None
