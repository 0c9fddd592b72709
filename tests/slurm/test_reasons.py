"""The reason why a job waits, in words."""

from __future__ import annotations

import pytest

from hpcrun.slurm.answers import reason_in_words


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
