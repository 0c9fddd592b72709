"""Slurm's messages about an end, in batch logs of every recorded version of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.diagnose.causes import blames_node, first_cause
from hpcrun.diagnose.finding import FailureFinding, find_cause
from hpcrun.diagnose.read_log import before_termination, labeled, scheduler_word
from hpcrun.run.endings import Failure

RECORDED = Path(__file__).resolve().parents[1] / "slurm" / "recorded"


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


@pytest.mark.parametrize("kind", ["JOB 22", "STEP 22.0"])
def test_a_signal_is_a_cancellation_of_a_job_only(kind: str) -> None:
    line = f"[2026-11-22T00:47:19.950] error: *** {kind} ON n1 CANCELLED AT 2026-11-22T00:47:19{{}} ***\n"
    for why in ("", " DUE to SIGNAL Terminated", " DUE to SIGNAL Killed"):
        assert (scheduler_word(line.format(why)) == "cancelled") == kind.startswith("JOB")
    assert scheduler_word(line.format(" DUE TO TASK FAILURE")) is None


@pytest.mark.parametrize(
    "words",
    [
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "srun: Force Terminated StepId=6.0",
        "slurmstepd-n1: error: *** STEP 5.0 ON node1 CANCELLED AT 2026-11-22T00:25:12 ***",
    ],
)
def test_what_follows_a_termination_is_cut_off(words: str) -> None:
    first = "srun: error: node1: task 0: Exited with exit code 1\n"
    assert before_termination(f"{first}{words}\nsrun: error: node2: task 1: Killed\n") == first
    assert before_termination(first) == first


def found_in(log: str) -> FailureFinding:
    """Return the finding of `hpcrun doctor` in a log."""
    lines = (labeled(text, "log", line) for line, text in enumerate(log.splitlines(), 1))
    found = find_cause(lines)
    assert found is not None
    return found


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_a_task_that_the_kernel_killed_for_memory_is_named(version: str) -> None:
    log = (RECORDED / version / "batch-out-of-memory.txt").read_text()
    told = first_cause([], [], log)
    assert told is not None
    assert (told.line, told.rank, told.host) == ("task 0 on node1: Out Of Memory", 0, "node1")
    assert not blames_node(told)
    assert scheduler_word(log) is None
    found = found_in(log)
    assert (found.id, found.rank, found.node) == ("slurm-out-of-memory", 0, "node1")


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
def test_a_step_ended_for_its_memory_is_no_killed_rank(version: str) -> None:
    """Slurm adds up the memory of all tasks on a node, and kills them all, so no rank is named."""
    log = (RECORDED / version / "batch-over-memory.txt").read_text()
    assert "1: Killed" in log
    told = first_cause([], [], log)
    assert told is not None
    assert told.line.startswith("node1: out of memory: StepId=1.0 exceeded memory limit (")
    assert told.line.endswith("; request more memory (job.mem)")
    assert (told.rank, told.host, told.cascade) == (None, "node1", 0)
    assert not blames_node(told)
    assert scheduler_word(log) is None
    found = found_in(log)
    # Since 25.05 slurmstepd does not name its node.
    node = None if version == "26.05" else "node1"
    assert (found.id, found.rank, found.node) == ("slurm-memory-limit", None, node)
    peers = Failure(1, "node1", 1.0, "RuntimeError", "Connection closed by peer", "", 7, "")
    assert (beside := first_cause([peers], [], log)) is not None
    assert (beside.line, beside.step, beside.cascade) == (told.line, 7, 1)


def test_no_node_is_guessed_if_slurm_names_none() -> None:
    log = (RECORDED / "26.05" / "batch-over-memory.txt").read_text()
    told = first_cause([], [], f"{log}srun: error: node2: task 2: Killed\n")
    assert told is not None
    assert told.line.startswith("a node: out of memory: StepId=1.0 exceeded memory limit (")
    assert told.host is None
