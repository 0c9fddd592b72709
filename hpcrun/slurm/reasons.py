"""Plain words for the reason why Slurm keeps a job waiting.

A requeued job shows ``BeginTime`` for two minutes, and people think that it is stuck: the words
say what happens next, and the remedy if waiting does not help.
"""

import re

_WAITING = {
    "BeginTime": "Slurm delays a requeued job by about two minutes "
    "(or the job requested a later start)",
    "BurstBufferResources": "for space in the burst buffer",
    "BurstBufferStageIn": "the burst buffer is being filled",
    "Constraints": "no free node fits the request (its constraint, gpus or mem)",
    "MaxPoweredUpNodes": "the site's limit of powered-up nodes is reached",
    "MpiPortsBusy": "for free ports for MPI on the nodes",
    "NvidiaImexChannels": "for a free NVIDIA IMEX channel",
    "Cleaning": "the last attempt is still being cleaned up before the requeue",
    "Dependency": "for another job to end first",
    "JobArrayTaskLimit": "the array runs its allowed number of tasks",
    "Licenses": "for a license",
    "Priority": "higher-priority jobs",
    "Prolog": "the nodes are being prepared",
    "SchedDefer": "Slurm considers new jobs at intervals here, and not yet this job",
    "Reservation": "for the reservation to begin",
    "Resources": "for enough free nodes; it is next in line",
    "WaitingForScheduling": "Slurm has not considered it yet",
    "None": "Slurm has not considered it yet",
}
_STUCK = {
    "AccountNotAllowed": "the partition does not take this account; correct job.account or "
    "job.partition and resubmit",
    "BadConstraints": "no node fits the request; correct constraint, gpus or mem and resubmit",
    "DeadLine": "it can no longer end before its deadline; cancel it and resubmit",
    "DependencyNeverSatisfied": "the job it depends on failed; cancel it and resubmit",
    "InvalidAccount": "the account is not valid; correct job.account and resubmit",
    "InvalidQOS": "the QOS is not valid; correct job.qos and resubmit",
    "JobHeldAdmin": "an administrator holds it; ask them, only they can release it",
    "JobHeldUser": "it is held; release it with: scontrol release JOB",
    "JobHoldMaxRequeue": "it was requeued too often at launch; check the nodes, then: "
    "scontrol release JOB",
    "MaxRequeue": "it was requeued too often at launch; check the nodes, then: "
    "scontrol release JOB",
    "NodeDown": "a node that it requests by name is down; resubmit without that name",
    "PartitionConfig": "the partition does not allow such a job (its size, time, account or group); see "
    "scontrol show partition, and choose another partition or request less",
    "PartitionDown": "the partition takes no new jobs now; wait, or choose another partition",
    "PartitionInactive": "the partition starts no jobs now; wait, or choose another partition",
    "PartitionNodeLimit": "the partition does not allow that many nodes; request fewer",
    "PartitionTimeLimit": "the partition does not allow that much time; request less",
    "QOSMinCpuNotSatisfied": "the QOS needs more CPUs per job; request more, or correct job.qos",
    "QOSNotAllowed": "the partition does not take this QOS; correct job.qos or job.partition and resubmit",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved "
    "(often a maintenance that a shorter job.time would fit before)",
    "RaisedSignal": "a signal ended it; see its log",
    "ReservationInvalid": "the requested reservation is not valid; correct job.reservation and resubmit",
    "ReservationDeleted": "its reservation is gone; correct job.reservation and resubmit",
    "launch failed requeued held": "its launch failed and Slurm holds it; check the nodes, then: "
    "scontrol release JOB",
    "job requeued in held state": "it was requeued and is held; release it with: "
    "scontrol release JOB",
}


# MaxCpuRunMinsPerUser, MaxGRESRunMinsPerAccount …
_RUN_MINUTES = re.compile(r"Max\w+RunMinsPer\w+")


def reason_in_words(reason: str) -> str:
    """Return one short clause for Slurm's reason code (squeue(1), "JOB REASON CODES").

    It starts with "waiting:" if the job only needs time, and with "stuck:" if it needs a change. An
    unknown code is returned as Slurm wrote it.
    """
    # It contains spaces or underscores, depending on Slurm's version and the program.
    code = reason.strip().strip("()").split(",")[0].replace("_", " ")
    if code in _STUCK:
        return f"stuck: {_STUCK[code]}"
    if code in _WAITING:
        return f"waiting: {_WAITING[code]}"
    if code.startswith("Nodes required for job are DOWN"):
        return "waiting: nodes that it needs are down, drained or kept for other partitions"
    if code.endswith(("PerJob", "PerJobLimit")):
        return (
            f"stuck: it requests more than the account or QOS allows a job ({code}); request less"
        )
    limits = ("Assoc", "QOS", "MaxMemPerLimit", "MaxCpuPer", "MaxNodePer", "Account")
    if code.startswith(limits) or _RUN_MINUTES.fullmatch(code):
        return f"waiting: a limit of the account or QOS is reached ({code})"
    return f"waiting: {code or 'Slurm gives no reason'}"
