"""Slurm's messages about an end, as Slurm 22.05 to 26.05 print them."""

import pytest

from hpcrun.diagnose.read_log import before_termination, scheduler_word

OLD = "slurmstepd-n1: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-22T00:25:12{} ***\n"
NEW = "[2026-11-22T00:47:19.950] error: *** JOB 22 ON n1 CANCELLED AT 2026-11-22T00:47:19{} ***\n"


@pytest.mark.parametrize("line", [OLD, NEW])
@pytest.mark.parametrize(
    ("why", "word"),
    [
        ("", "cancelled"),
        (" DUE to SIGNAL Terminated", "cancelled"),
        (" DUE to SIGNAL Killed", "cancelled"),
        (" DUE TO PREEMPTION", "preemption"),
        (" DUE TO TIME LIMIT", "time-limit"),
        (" DUE TO JOB REQUEUE", "preemption"),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "node-failure"),
        (" DUE TO TASK FAILURE", None),
    ],
)
def test_the_reason_is_read_from_every_version(line: str, why: str, word: str | None) -> None:
    assert scheduler_word(line.format(why)) == word


@pytest.mark.parametrize("why", ["", " DUE to SIGNAL Killed", " DUE TO TASK FAILURE"])
def test_the_end_of_a_step_does_not_end_the_job(why: str) -> None:
    line = NEW.replace("JOB 22", "STEP 22.0").format(why)
    assert scheduler_word(line) is None


@pytest.mark.parametrize(
    "words",
    [
        "srun: launch/slurm: _step_signal: Terminating StepId=6.0",
        "srun: Terminating StepId=6.0",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "srun: Force Terminated StepId=6.0",
        OLD.replace("JOB 5", "STEP 5.0").format("").strip(),
    ],
)
def test_what_follows_a_termination_is_cut_off(words: str) -> None:
    first = "srun: error: node1: task 0: Exited with exit code 1\n"
    assert before_termination(f"{first}{words}\nsrun: error: node2: task 1: Killed\n") == first
    assert before_termination(first) == first
