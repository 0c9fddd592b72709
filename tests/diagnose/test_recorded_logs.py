"""Slurm's word for an end, in batch logs of every recorded version of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.diagnose.slurm_log import before_termination, scheduler_word

RECORDED = Path(__file__).resolve().parents[1] / "cluster" / "recorded"


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
@pytest.mark.parametrize(
    ("scene", "word"),
    [
        ("cancelled", "cancelled"),
        ("time-limit", "time-limit"),
        ("preempted", "preemption"),
        ("preempted-by-qos", "preemption"),
        ("requeued", "preemption"),
        ("node-failure", "node-failure"),
        ("rank-killed", None),
        ("signalled", None),
    ],
)
def test_the_reason_for_the_end_is_read(version: str, scene: str, word: str | None) -> None:
    assert scheduler_word((RECORDED / version / f"batch-{scene}.txt").read_text()) == word


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_the_killed_rank_is_named_before_srun_kills_the_other(version: str) -> None:
    log = (RECORDED / version / "batch-rank-killed.txt").read_text()
    first = before_termination(log)
    assert "task 1: Killed" in first
    assert "task 0" not in first
    assert "task 0" in log
