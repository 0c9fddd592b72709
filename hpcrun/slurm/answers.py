"""Parsers for the output of Slurm's programs about jobs and nodes, one function per kind of output.

The tests use output that was recorded from the real programs of several versions.

A requeued job shows ``BeginTime`` for two minutes, and people think that it is stuck: the words
say what happens next, and the remedy if waiting does not help.
"""

import json
import re
from dataclasses import dataclass
from typing import Literal

from hpcrun.errors import ClusterError
from hpcrun.slurm.commands import Completed
from hpcrun.slurm.notation import JOB_ID, host_names, unix_time


@dataclass(frozen=True)
class JobInfo:
    """A job as the controller sees it now.

    ``end_time`` (Unix seconds) is the end of the time limit while it runs, and the end of the grace
    period once it is being preempted; for a waiting job it is an estimate. ``start_time`` (Unix seconds)
    of a waiting job is its expected start. An unknown time is None. A ``name`` with a ``|`` is cut.
    """

    state: str
    reason: str
    nodes: tuple[str, ...]
    end_time: float | None
    name: str = ""
    start_time: float | None = None


@dataclass(frozen=True)
class JobRecord:
    """One attempt of a job in Slurm's accounting, times in Unix seconds.

    ``state`` is one word.
    """

    job_id: str
    state: str
    exit_code: int
    signal: int
    start: float | None
    end: float | None
    nodes: tuple[str, ...]


def parse_squeue(text: str) -> dict[str, JobInfo]:
    """Return the jobs that squeue lists, by id; a job that it has forgotten is absent.

    Lines of another format (a site's banner) are ignored.
    """
    jobs = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 5)
        if len(fields) != 6 or not JOB_ID.fullmatch(fields[0]):
            continue
        job_id, state, nodes, times, _left, free = fields
        end, _, start = times.partition(",")
        reason, name = free.rsplit("|", 1) if "|" in free else (free, "")
        jobs[job_id] = JobInfo(
            state, reason, host_names(nodes), unix_time(end), name, unix_time(start)
        )
    return jobs


def parse_steps(text: str, name: str | None = None, *, begins: str = "") -> list[int]:
    """Return the numbers of the steps that srun has started; the batch script's step has none.

    Args:
        name: only steps with this name; None: all.
        begins: only steps with a name that begins like this.
    """
    lines = (line.strip().partition("|") for line in text.splitlines())
    found = (step for step, _, own in lines if name in (None, own) and own.startswith(begins))
    ids = (step.rpartition(".") for step in found)
    return sorted({int(step) for job, _, step in ids if job and step.isdecimal()})


def parse_sacct(text: str) -> list[JobRecord]:
    """Return one record per row, in sacct's order, which for one job is that of its attempts."""
    records = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 6 or not JOB_ID.fullmatch(fields[0]):
            continue
        job_id, state, exit_code, start, end, nodes = fields
        # "CANCELLED by 1000", or "CANCELLED+" if the column was too narrow.
        word = state.partition(" by ")[0]
        code, _, signal = exit_code.partition(":")
        records.append(
            JobRecord(
                job_id=job_id,
                state=word.rstrip("+"),
                exit_code=int(code or 0),
                signal=int(signal or 0),
                start=unix_time(start),
                end=unix_time(end),
                nodes=host_names(nodes),
            )
        )
    return records


_SHOWN_KEY = re.compile(r"(?:^|(?<=\s))([A-Z][A-Za-z0-9_/:]*)=")

_FREE_TEXT = frozenset(
    {"JobName", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "SubmitLine"}
    | {"Comment", "AdminComment", "SystemComment", "Extra"}
)


def parse_show_job(text: str, job_id: str | None = None) -> dict[str, str]:
    """Return the fields of one job, such as PreemptTime, Restarts and Requeue, as Slurm's text.

    The number of a job array is also the number of one of its tasks, and Slurm shows all tasks then:
    ``job_id`` chooses the record with that number (JobId). Without it, the first record counts.

    Names chosen by the user end their line in Slurm's output, so a field that a name imitates
    stays part of that name. Read times with ``unix_time``.
    """
    fields: dict[str, str] = {}
    for line in _record_of(text, job_id).splitlines():
        keys = list(_SHOWN_KEY.finditer(line))
        ends = [key.start() for key in keys[1:]] + [len(line)]
        for key, end_of_value in zip(keys, ends, strict=False):
            free = key.group(1) in _FREE_TEXT
            end = len(line) if free else end_of_value
            fields.setdefault(key.group(1), line[key.end() : end].strip())
            if free:
                break
    return fields


def _record_of(text: str, job_id: str | None) -> str:
    """Return the record of the job; the whole text where no record has its number."""
    if job_id is None:
        return text
    records = re.split(r"\n\s*\n(?=JobId=)", text)
    mine = (one for one in records if re.match(rf"\s*JobId={re.escape(job_id)}\s", one))
    return next(mine, text)


def parse_job_states(text: str) -> frozenset[str]:
    """Return the states of the job in scontrol's JSON, such as CANCELLED and COMPLETING.

    Empty if ``text`` is not such JSON. Newer versions print a list of states, older versions a word. A
    job that is requeued after a preemption counts as PREEMPTED as well: only its ``preempt_time`` shows it.
    """
    try:
        answer = json.loads(text)
        job = answer["jobs"][0]
        states, preempted = job["job_state"], job.get("preempt_time")
    except (ValueError, LookupError, TypeError, AttributeError):
        return frozenset()
    listed = states if isinstance(states, list) else [states]
    found = {state.upper() for state in listed if isinstance(state, str)}
    when = preempted.get("number") if isinstance(preempted, dict) else preempted
    return frozenset(found | ({"PREEMPTED"} if when else set()))


def parse_sinfo(text: str) -> dict[str, str]:
    """Return each node's state from sinfo (``idle``, ``down*``), in sinfo's order.

    A node of several partitions is listed once for each.
    """
    lines = (line.strip().split("|") for line in text.splitlines())
    return {fields[0]: fields[1] for fields in lines if len(fields) == 2}


_SUBMITTED = re.compile(r"(?:Submitted batch job )?([0-9]+)(?:(?:;| on cluster )\S+)?")


def parse_sbatch(text: str) -> str:
    """Return the job id that sbatch printed, as ``123``, ``123;cluster`` or ``Submitted batch job 123``.

    Raises:
        ClusterError: the last line contains no job id.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    match = _SUBMITTED.fullmatch(lines[-1]) if lines else None
    if match is None:
        raise ClusterError(
            f"sbatch answered {lines[-1] if lines else 'nothing'!r}: expected a job id; "
            "see with squeue --me whether the job was submitted"
        )
    return match[1]


RequeueError = Literal["denied", "disabled", "batch-only", "pending", "transient", "unknown"]

_REQUEUE_ERRORS: tuple[tuple[str, RequeueError], ...] = (
    ("access/permission denied", "denied"),
    ("requested operation is presently disabled", "disabled"),
    ("only batch jobs are accepted", "batch-only"),
    ("job is pending execution", "pending"),
    ("unable to contact slurm controller", "transient"),
    # scontrol requeue prints this when no controller answers (observed with Slurm 22.05).
    ("unexpected message received", "transient"),
    ("socket timed out", "transient"),
    ("zero bytes were transmitted", "transient"),
    ("in standby mode", "transient"),
    ("can not be altered now, try again later", "transient"),
    ("protocol authentication error", "transient"),
    ("connection refused", "transient"),
    ("timed out after", "transient"),
)


def classify_requeue_error(stderr: str) -> RequeueError:
    """Classify a failed ``scontrol requeue`` by its error text (slurm_errno.c).

    "pending": the job has been requeued already, which is success. "transient": try again. "denied",
    "disabled" (submitted with --no-requeue) and "batch-only" (under salloc): another try is
    useless.
    """
    text = stderr.lower()
    return next((kind for phrase, kind in _REQUEUE_ERRORS if phrase in text), "unknown")


# Exit codes of a shell, and of slurm.run, for a program that is absent or may not be executed.
_CANNOT_RUN = (126, 127)
_OTHER_VERSION = (
    *("incompatible versions", "protocol version has changed", "loading shared libraries"),
    *("plugin_load_from_file", "load specified plugin"),
)
_LAST_LINES = 3
_PREFIX = re.compile(r"^(?:sbatch|srun|scontrol): (?:error: |fatal: )?", re.MULTILINE)


def cannot_run(answer: Completed) -> bool:
    """Return True if a program of Slurm is absent, may not be executed, or belongs to another version."""
    text = answer.stderr.lower()
    return answer.returncode in _CANNOT_RUN or (
        answer.returncode != 0 and any(words in text for words in _OTHER_VERSION)
    )


def refusal_words(answer: Completed) -> str:
    """Return the reason in one line that a program of Slurm gave; empty without a word.

    A site's own check or wrapper may print the reason to stdout, and leave stderr empty or without a reason.
    """
    reason = " ".join(_PREFIX.sub("", answer.stderr).split())
    reason = reason.replace("Batch job submission failed: ", "")
    if reason and reason not in _NO_REASON:
        return reason
    printed = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    return " / ".join([*printed[-_LAST_LINES:], *([reason] if reason else [])])


_NO_REASON = ("Unspecified error", "error", "failed")


def remedy_of_refusal(words: str) -> str:
    """Return what to do about a job that sbatch has refused with ``words``."""
    if classify_requeue_error(words) == "transient":
        return "Slurm's controller does not answer: submit again later, or tell an administrator"
    if "Invalid job array specification" in words:
        return "MaxArraySize of this cluster limits a sweep; divide its values among several, with --name"
    return "change the `job:` section or the flags, and see `sinfo`"


def is_unknown_job(answer: Completed) -> bool:
    """Return True if the controller has forgotten the job; any other failure gives False."""
    return answer.returncode != 0 and "Invalid job id specified" in answer.stderr


_WAITING = {
    "BeginTime": "Slurm delays a requeued job by about two minutes "
    "(or the job requested a later start)",
    "Constraints": "no free node fits the request (its constraint, gpus or mem)",
    "Dependency": "for another job to end first",
    "JobArrayTaskLimit": "the array runs its allowed number of tasks",
    "Licenses": "for a license",
    "Priority": "higher-priority jobs",
    "Prolog": "the nodes are being prepared",
    "Reservation": "for the reservation to begin",
    "Resources": "for enough free nodes; it is next in line",
    "None": "Slurm has not considered it yet",
}
_STUCK = {
    "AccountNotAllowed": "the partition does not take this account; correct job.account or "
    "job.partition and resubmit",
    "BadConstraints": "no node fits the request; correct constraint, gpus or mem and resubmit",
    "DependencyNeverSatisfied": "the job it depends on failed; cancel it and resubmit",
    "InvalidAccount": "the account is not valid; correct job.account and resubmit",
    "InvalidQOS": "the QOS is not valid; correct job.qos and resubmit",
    "JobHeldAdmin": "an administrator holds it; ask them, only they can release it",
    "JobHeldUser": "it is held; release it with: scontrol release JOB",
    "JobHoldMaxRequeue": "it was requeued too often at launch; check the nodes, then: "
    "scontrol release JOB",
    "MaxRequeue": "it was requeued too often at launch; check the nodes, then: "
    "scontrol release JOB",
    "PartitionConfig": "the partition does not allow such a job (its size, time, account or group); see "
    "scontrol show partition, and choose another partition or request less",
    "PartitionDown": "the partition takes no new jobs now; wait, or choose another partition",
    "PartitionNodeLimit": "the partition does not allow that many nodes; request fewer",
    "PartitionTimeLimit": "the partition does not allow that much time; request less",
    "QOSNotAllowed": "the partition does not take this QOS; correct job.qos or job.partition and resubmit",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved "
    "(often a maintenance that a shorter job.time would fit before)",
    "ReservationInvalid": "the requested reservation is not valid; correct job.reservation and resubmit",
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


WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
    | {"RESV_DEL_HOLD", "REVOKED"}
)
_OVER = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
    | {"BOOT_FAIL", "DEADLINE"}
)


def is_over(state: str) -> bool:
    """Return True if a job in ``state`` no longer runs and does not wait for a start.

    A newer Slurm may have states that this table lacks, and a run with a job that might be live must stay
    unchanged.
    """
    return state in _OVER
