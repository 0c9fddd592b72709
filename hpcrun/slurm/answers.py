"""Parsers for the output of Slurm's programs about jobs and nodes, one function per kind of output.

The tests use output that was recorded from the real programs of several versions.
"""

import json
import re
from dataclasses import dataclass

from hpcrun.errors import ClusterError
from hpcrun.slurm.values import JOB_ID, host_names, unix_time


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


def parse_steps(text: str, name: str | None = None) -> list[int]:
    """Return the numbers of the steps that srun has started; the batch script's step has none.

    Args:
        name: only steps with this name; None: all.
    """
    lines = (line.strip().partition("|") for line in text.splitlines())
    ids = (step.rpartition(".") for step, _, named in lines if name in (None, named))
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


_SUBMITTED = re.compile(r"(?:Submitted batch job )?([0-9]+)(?:(?:;| on cluster )(\S+))?")


def parse_sbatch(text: str) -> tuple[str, str | None]:
    """Return the job id that sbatch printed, and the cluster, which sbatch prints only after ``--clusters``.

    Its forms are ``123``, ``123;cluster`` and ``Submitted batch job 123 on cluster NAME``.

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
    return match[1], match[2]
