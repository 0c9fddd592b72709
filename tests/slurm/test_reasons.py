"""The reason why a job waits, in words."""

from __future__ import annotations

import pytest

from hpcrun.slurm.answers import (
    cannot_run,
    reason_in_words,
    refusal_words,
    remedy_of_refusal,
)
from hpcrun.slurm.commands import Completed


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("BeginTime", "waiting: Slurm delays a requeued job by about two minutes"),
        ("(Resources)", "waiting: for enough free nodes"),
        ("ReqNodeNotAvail, UnavailableNodes:node[4-5]", "stuck: nodes that it needs are down"),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
            "partitions",
            "waiting: nodes that it needs are down",
        ),
        ("QOSMaxGRESPerUser", "waiting: a limit of the account or QOS is reached"),
        ("QOSNotAllowed", "stuck: the partition does not take this QOS"),
        ("QOSMaxNodePerJobLimit", "stuck: it requests more than the account or QOS allows a job"),
        ("PartitionConfig", "stuck: the partition does not allow such a job"),
        # squeue -o %r of Slurm 22.05, and its manual.
        ("job requeued in held state", "stuck: it was requeued and is held; release it"),
        ("(launch_failed_requeued_held)", "stuck: its launch failed and Slurm holds it"),
        ("JobHeldAdmin", "stuck: an administrator"),
        # Slurm 26.05.
        ("Constraints", "waiting: no free node fits the request"),
        ("ReservationInvalid", "stuck: the requested reservation is not valid"),
        ("AssocGrpJobsLimit", "waiting: a limit of the account or QOS is reached"),
        ("MaxCpuRunMinsPerUser", "waiting: a limit of the account or QOS is reached"),
        ("MaxGRESRunMinsPerAccount", "waiting: a limit of the account or QOS is reached"),
        ("SomethingNew", "waiting: SomethingNew"),
        ("", "waiting: Slurm gives no reason"),
    ],
)
def test_a_reason_says_whether_patience_is_enough(reason: str, words: str) -> None:
    assert reason_in_words(reason).startswith(words)


@pytest.mark.parametrize(
    ("stderr", "stdout", "reason", "remedy"),
    [
        ("sbatch: error: Batch job submission failed: Invalid qos specification\n", "banner\n",
         "Invalid qos specification", "change the `job:` section"),
        # A site's wrapper prints its checks to stdout.
        ("", "--> Checks the allocation...FAILED\nERROR: You have exceeded your allocation.\n",
         "--> Checks the allocation...FAILED / ERROR: You have exceeded your allocation.", "change the"),
        ("sbatch: error: Batch job submission failed: Unspecified error\n", "no hours left\n",
         "no hours left / Unspecified error", "change the"),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n",
         "", "Unable to contact slurm controller (connect failure)", "submit again later"),
        ("", "", "", "change the"),
    ],
)  # fmt: skip
def test_a_refusal_has_its_reason_and_the_right_remedy(
    stderr: str, stdout: str, reason: str, remedy: str
) -> None:
    words = refusal_words(Completed(1, stdout, stderr))
    assert words == reason
    assert remedy in remedy_of_refusal(words)


@pytest.mark.parametrize(
    ("code", "stderr", "cannot"),
    [
        (127, "cannot run scontrol: No such file or directory", True),
        (126, "scontrol: Permission denied", True),
        (1, "scontrol: error: plugin_load_from_file: Incompatible Slurm plugin", True),
        (1, "slurm_load_jobs error: Unable to contact slurm controller", False),
        (1, "slurm_load_jobs error: Invalid job id specified", False),
        (0, "", False),
    ],
)
def test_a_program_that_cannot_run_is_no_silent_controller(
    code: int, stderr: str, cannot: bool
) -> None:
    assert cannot_run(Completed(code, "", stderr)) is cannot
