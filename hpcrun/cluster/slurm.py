"""Everything we ask of Slurm's programs: a pure builder of each command, a pure parser of each
answer, and one function that runs them.

Kept in one place because Slurm's texts differ between versions and sites, and because the parsers
are tested on what the real programs printed. Times are asked for as Unix seconds through
SLURM_TIME_FORMAT, which spares us time zones and the hour that repeats in autumn.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcrun.cluster.errors import ClusterError
from hpcrun.cluster.hostlist import expand
from hpcrun.cluster.reasons import reason_in_words

__all__ = [
    "Completed",
    "JobInfo",
    "JobRecord",
    "RequeueError",
    "classify_requeue_error",
    "cluster_name",
    "configured",
    "is_unknown_job",
    "parse_job_states",
    "parse_sacct",
    "parse_sbatch",
    "parse_show_job",
    "parse_squeue",
    "reason_in_words",
    "run",
    "sacct_command",
    "scancel_command",
    "scontrol_requeue_command",
    "scontrol_show_job_command",
    "seconds",
    "squeue_command",
    "unix_time",
]

RequeueError = Literal["denied", "disabled", "batch-only", "pending", "transient", "unknown"]

TIMED_OUT = 124
NOT_FOUND = 127

_JOB_ID = re.compile(r"[0-9]+(?:[_+][0-9]+)?")
_SIGNAL = re.compile(r"[A-Z0-9]+")
# The reason and the name come last, as the two fields whose text is free.
_SQUEUE_FORMAT = "%i|%T|%N|%e|%L|%r|%j"
_SACCT_FORMAT = "JobID,State,ExitCode,Start,End,NodeList"


@dataclass(frozen=True)
class Completed:
    """How a program ended: 124 where it took too long, 127 where it is not installed."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class JobInfo:
    """A job as the controller sees it now.

    ``end_time`` (Unix seconds) is the end of the time limit while it runs, and the end of the grace
    period once it is being preempted; of a waiting job it is a guess. ``time_left`` (seconds) does
    not shrink at a preemption. Both are None where Slurm knows none. A ``name`` with a ``|`` is cut.
    """

    state: str
    reason: str
    nodes: tuple[str, ...]
    end_time: float | None
    time_left: int | None
    name: str = ""


@dataclass(frozen=True)
class JobRecord:
    """One attempt of a job as accounting keeps it, times in Unix seconds.

    ``state`` is one word; who cancelled (a user id, where told) is in ``cancelled_by``.
    """

    job_id: str
    state: str
    cancelled_by: str | None
    exit_code: int
    signal: int
    start: float | None
    end: float | None
    nodes: tuple[str, ...]


def run(
    argv: Sequence[str], timeout: float = 10.0, environ: Mapping[str, str] | None = None
) -> Completed:
    """Run a program to its end and return what it printed; the only place that does.

    It never raises: a program that is missing, or slower than ``timeout`` seconds, is a return
    code (127, 124) with a line in ``stderr``.

    Args:
        argv: program and arguments; no shell sees them.
        timeout: seconds before it is killed. squeue takes 18 s to notice a dead controller.
        environ: the environment, exactly (for sbatch, which hands it to the job). None means ours
            in which no default of the user's bends the answer.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            # A second Ctrl-C is not to end the scancel that the first one has led to.
            start_new_session=True,
            env=_plain_environment(os.environ) if environ is None else dict(environ),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Completed(TIMED_OUT, "", f"{argv[0]} timed out after {timeout:g} s")
    except OSError as error:
        return Completed(NOT_FOUND, "", f"cannot run {argv[0]}: {error.strerror}")
    return Completed(done.returncode, done.stdout, done.stderr)


def _plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Drop what changes an answer (SQUEUE_STATES, SLURM_CLUSTERS …), fix language and times.

    A default cluster of the user's goes to sbatch as job.cluster. Each question after that names the
    cluster that the job is on.
    """
    bending = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_", "SINFO_", "SLURM_CLUSTERS")
    kept = {name: value for name, value in environ.items() if not name.startswith(bending)}
    return kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


def configured(timeout: float = 3.0) -> bool:
    """Tell whether jobs go to Slurm here: sbatch is on PATH, and knows a cluster.

    Its controller may be slow, or away: who has a cluster does not mean to compute on its login host.
    """
    if shutil.which("sbatch") is None:
        return False
    return "configuration source" not in run(["scontrol", "ping"], timeout=timeout).stderr


def cluster_name(timeout: float = 6.0) -> str | None:
    """The name of the cluster whose controller answers here; None where none does."""
    return parse_cluster_name(run(["scontrol", "show", "config"], timeout=timeout).stdout)


def parse_cluster_name(text: str) -> str | None:
    """Read ``ClusterName`` from what ``scontrol show config`` prints; None where it is not there."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
    return found and found[1]


def _checked(job_id: str) -> str:
    if not _JOB_ID.fullmatch(job_id):
        raise ClusterError(
            f"job id {job_id!r}: expected a number such as 123, or 123_4 of an array"
        )
    return job_id


def _of(cluster: str | None) -> list[str]:
    return [] if cluster is None else [f"--clusters={cluster}"]


def squeue_command(job_ids: Sequence[str], cluster: str | None = None) -> list[str]:
    """Build the query for all these jobs at once; ended ones stay known for some minutes.

    Here and below, ``cluster`` is for ``--clusters``: another cluster than this host's.
    """
    jobs = ",".join(_checked(job_id) for job_id in job_ids)
    return [
        "squeue",
        *_of(cluster),
        "--noheader",
        "--array",
        "--states=all",
        f"--format={_SQUEUE_FORMAT}",
        f"--jobs={jobs}",
    ]


def parse_squeue(text: str) -> dict[str, JobInfo]:
    """Return the jobs that squeue knows, by id; one it has forgotten is absent.

    Lines of another shape (a site's banner) are passed over.
    """
    jobs = {}
    for line in text.splitlines():
        fields = line.strip().split("|", 5)
        if len(fields) != 6 or not _JOB_ID.fullmatch(fields[0]):
            continue
        job_id, state, nodes, end, left, free = fields
        reason, name = free.rsplit("|", 1) if "|" in free else (free, "")
        jobs[job_id] = JobInfo(state, reason, _hosts(nodes), unix_time(end), seconds(left), name)
    return jobs


def is_unknown_job(answer: Completed) -> bool:
    """Tell an answer about a job that the controller has forgotten from one that failed."""
    return answer.returncode != 0 and "Invalid job id specified" in answer.stderr


def sacct_command(job_ids: Sequence[str], cluster: str | None = None) -> list[str]:
    """Build the query for every attempt of these jobs; without --duplicates only the last shows."""
    jobs = ",".join(_checked(job_id) for job_id in job_ids)
    return [
        "sacct",
        *_of(cluster),
        "--noheader",
        "--parsable2",
        "--allocations",
        "--duplicates",
        f"--format={_SACCT_FORMAT}",
        f"--jobs={jobs}",
    ]


def parse_sacct(text: str) -> list[JobRecord]:
    """Return one record a row, in sacct's order, which for one job is that of its attempts."""
    records = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) != 6 or not _JOB_ID.fullmatch(fields[0]):
            continue
        job_id, state, exit_code, start, end, nodes = fields
        # "CANCELLED by 1000", and "CANCELLED+" where a column was too narrow for that.
        word, _, canceller = state.partition(" by ")
        code, _, signal = exit_code.partition(":")
        records.append(
            JobRecord(
                job_id=job_id,
                state=word.rstrip("+"),
                cancelled_by=canceller or None,
                exit_code=int(code or 0),
                signal=int(signal or 0),
                start=unix_time(start),
                end=unix_time(end),
                nodes=_hosts(nodes),
            )
        )
    return records


def scontrol_requeue_command(job_id: str, cluster: str | None = None) -> list[str]:
    """Build the requeue of one job. It kills the job's processes: save first."""
    return ["scontrol", *_of(cluster), "requeue", _checked(job_id)]


_REQUEUE_ERRORS: tuple[tuple[str, RequeueError], ...] = (
    ("access/permission denied", "denied"),
    ("requested operation is presently disabled", "disabled"),
    ("only batch jobs are accepted", "batch-only"),
    ("job is pending execution", "pending"),
    ("unable to contact slurm controller", "transient"),
    # What scontrol requeue says when no controller answers (seen with Slurm 22.05).
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
    """Say what a failed ``scontrol requeue`` means, from its error text (slurm_errno.c).

    "pending": it has been requeued already, which is success. "transient": ask again. "denied",
    "disabled" (submitted with --no-requeue) and "batch-only" (under salloc): asking again is
    useless.
    """
    text = stderr.lower()
    return next((kind for phrase, kind in _REQUEUE_ERRORS if phrase in text), "unknown")


def scontrol_show_job_command(
    job_id: str, cluster: str | None = None, *, as_json: bool = False
) -> list[str]:
    """Build the query for all that the controller knows of one job.

    JSON also tells the state under COMPLETING; scontrol of 22.05 has no such option and refuses.
    """
    form = ["--json"] if as_json else []
    return ["scontrol", *_of(cluster), "show", "job", _checked(job_id), *form]


_SHOWN_KEY = re.compile(r"(?:^|(?<=\s))([A-Z][A-Za-z0-9_/:]*)=")
_FREE_TEXT = frozenset(
    {"JobName", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "SubmitLine"}
    | {"Comment", "AdminComment", "SystemComment", "Extra"}
)


def parse_show_job(text: str) -> dict[str, str]:
    """Return the fields of one job, such as PreemptTime, Restarts and Requeue, as Slurm's text.

    Names chosen by the user end their line in Slurm's output, so a field that one of them fakes
    stays part of that name. Read times with ``unix_time``.
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        keys = list(_SHOWN_KEY.finditer(line))
        ends = [key.start() for key in keys[1:]] + [len(line)]
        for key, end_of_value in zip(keys, ends, strict=False):
            free = key.group(1) in _FREE_TEXT
            end = len(line) if free else end_of_value
            fields.setdefault(key.group(1), line[key.end() : end].strip())
            if free:
                break
    return fields


def parse_job_states(text: str) -> frozenset[str]:
    """Return the states of the job in scontrol's JSON, such as CANCELLED and COMPLETING.

    Empty where ``text`` is not such JSON. Newer versions print a list of states, older ones a word. A
    job that is requeued after a preemption counts as PREEMPTED as well: only its ``preempt_time`` says so.
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


def sinfo_command(
    hosts: Sequence[str] = (), partition: str | None = None, cluster: str | None = None
) -> list[str]:
    """Build the query for the state of these nodes, or of all of a partition, or of all there are."""
    command = ["sinfo", *_of(cluster), "--noheader", "--Node", "--format=%N|%T"]
    if hosts:
        command.append(f"--nodes={','.join(hosts)}")
    if partition:
        command.append(f"--partition={partition}")
    return command


def parse_sinfo(text: str) -> dict[str, str]:
    """Return each node's state as sinfo says it (``idle``, ``down*``), in sinfo's order.

    A node of several partitions is listed once for each.
    """
    lines = (line.strip().split("|") for line in text.splitlines())
    return {fields[0]: fields[1] for fields in lines if len(fields) == 2}


def scontrol_exclude_command(job_id: str, hosts: Sequence[str]) -> list[str]:
    """Build the order that a pending job stay away from these nodes; from none where there are none."""
    return ["scontrol", "update", f"JobId={_checked(job_id)}", f"ExcNodeList={','.join(hosts)}"]


def scancel_command(
    job_id: str,
    signal: str | None = None,
    *,
    full: bool = False,
    step: int | None = None,
    cluster: str | None = None,
) -> list[str]:
    """Build the end of a job, or a signal (such as "USR2") to its steps, or to one ``step``.

    ``full`` reaches the batch script too, with its children (scancel(1), --full). KILL is a signal
    only for a step: for a job Slurm takes it as the order to end it, with SIGTERM first.

    Raises:
        ClusterError: the job id or the signal is not one.
    """
    argv = ["scancel", *_of(cluster)]
    if signal is not None:
        if not _SIGNAL.fullmatch(signal):
            raise ClusterError(f"signal {signal!r}: expected a name such as USR2 or TERM")
        argv.append(f"--signal={signal}")
    if full:
        argv.append("--full")
    return [*argv, _checked(job_id) if step is None else f"{_checked(job_id)}.{step}"]


def scontrol_show_nodes_command(cluster: str | None = None) -> list[str]:
    """Build the query for all that the controller knows of its nodes, a line each."""
    return ["scontrol", *_of(cluster), "--oneliner", "show", "nodes"]


def scontrol_show_partitions_command(cluster: str | None = None) -> list[str]:
    """Build the query for all partitions, a line each."""
    return ["scontrol", *_of(cluster), "--oneliner", "show", "partitions"]


def scontrol_show_config_command(cluster: str | None = None) -> list[str]:
    """Build the query for the cluster's configuration."""
    return ["scontrol", *_of(cluster), "show", "config"]


_SUBMITTED = re.compile(r"(?:Submitted batch job )?([0-9]+)(?:(?:;| on cluster )(\S+))?")


def parse_sbatch(text: str) -> tuple[str, str | None]:
    """Return the job id that sbatch printed, and the cluster, which it names only after ``--clusters``.

    Its forms are ``123``, ``123;cluster`` and ``Submitted batch job 123 on cluster NAME``.

    Raises:
        ClusterError: the last line holds no job id.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    match = _SUBMITTED.fullmatch(lines[-1]) if lines else None
    if match is None:
        raise ClusterError(
            f"sbatch answered {lines[-1] if lines else 'nothing'!r}: expected a job id; "
            "see with squeue --me whether the job was submitted"
        )
    return match[1], match[2]


def unix_time(text: str) -> float | None:
    """Read a time as Slurm prints it: Unix seconds, or ISO in this machine's time zone.

    ``N/A``, ``NONE``, ``Unknown`` and the like are None.
    """
    text = text.strip()
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


def seconds(text: str) -> int | None:
    """Read a duration ``D-HH:MM:SS`` with its leading parts left out; UNLIMITED and such: None."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _hosts(nodes: str) -> tuple[str, ...]:
    """Expand a node list; a job without nodes shows "", "None assigned" or "(null)"."""
    if nodes in ("", "None assigned", "(null)", "n/a"):
        return ()
    return tuple(expand(nodes))
