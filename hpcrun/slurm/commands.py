"""Builders for the command lines of Slurm's programs. No function here runs a program.

SLURM_TIME_FORMAT requests Unix seconds, which avoids time zones and the repeated hour in
autumn.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcrun.config.slurm_options import NAMES
from hpcrun.errors import ClusterError
from hpcrun.slurm.notation import JOB_ID

# The reason and the name come last, because users and sites choose their text. %e and %S are times.
_SQUEUE_FORMAT = "%i|%T|%N|%e,%S|%L|%r|%j"
_SACCT_FORMAT = "JobID,State,ExitCode,Start,End,NodeList"


def squeue_command(job_ids: Sequence[str]) -> list[str]:
    """Build one query for all these jobs; Slurm remembers ended jobs for some minutes."""
    jobs = ",".join(_checked(job_id) for job_id in job_ids)
    return [
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        f"--format={_SQUEUE_FORMAT}",
        f"--jobs={jobs}",
    ]


def squeue_named_command(name: str) -> list[str]:
    """Build the query for this user's jobs of that name that have not ended."""
    return ["squeue", "--noheader", "--me", "--format=%A", f"--name={name}"]


def srun_help_command() -> list[str]:
    """Build the call that prints srun's options, with those of the plugins of this site."""
    return ["srun", "--help"]


def squeue_steps_command(job_id: str) -> list[str]:
    """Build the query for the steps of one job that have not ended, with their names."""
    job = _checked(job_id)
    return ["squeue", "--noheader", "--steps", "--format=%i|%j", f"--jobs={job}"]


def sacct_command(job_ids: Sequence[str]) -> list[str]:
    """Build the query for every attempt of these jobs; without --duplicates only the last shows."""
    jobs = ",".join(_checked(job_id) for job_id in job_ids)
    return [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        "--duplicates",
        f"--format={_SACCT_FORMAT}",
        f"--jobs={jobs}",
    ]


def scontrol_requeue_command(job_id: str) -> list[str]:
    """Build the requeue of one job. It kills the job's processes: save first."""
    return ["scontrol", "requeue", _checked(job_id)]


def scontrol_show_job_command(job_id: str, *, as_json: bool = False) -> list[str]:
    """Build the query for all that the controller knows of one job.

    JSON also has the state that COMPLETING hides; scontrol of 22.05 has no such option and refuses it.
    """
    form = ["--json"] if as_json else []
    return ["scontrol", "show", "job", _checked(job_id), *form]


def sinfo_command(hosts: Sequence[str] = ()) -> list[str]:
    """Build the query for the state of these nodes, or of all nodes."""
    named = [f"--nodes={','.join(hosts)}"] if hosts else []
    return ["sinfo", "--noheader", "--Node", "--format=%N|%T", *named]


def scontrol_exclude_command(job_id: str, hosts: Sequence[str]) -> list[str]:
    """Build the command that makes a pending job exclude these nodes; without nodes, exclude none."""
    return ["scontrol", "update", f"JobId={_checked(job_id)}", f"ExcNodeList={','.join(hosts)}"]


def scontrol_shrink_command(job_id: str, hosts: Sequence[str]) -> list[str]:
    """Build the command that leaves a running job only these of its nodes, with the batch host."""
    return ["scontrol", "update", f"JobId={_checked(job_id)}", f"NodeList={','.join(hosts)}"]


def scancel_command(
    job_id: str,
    signal: str | None = None,
    *,
    step: int | None = None,
) -> list[str]:
    """Build the end of a job, or a signal (such as "USR2") to its steps, or to one ``step``.

    KILL is a signal only for a step: for a job, Slurm takes it as the command to end the job, with
    SIGTERM first.

    Raises:
            ClusterError: the job id is not valid.
    """
    argv = ["scancel"]
    if signal is not None:
        argv.append(f"--signal={signal}")
    return [*argv, _checked(job_id) if step is None else f"{_checked(job_id)}.{step}"]


def scontrol_show_nodes_command() -> list[str]:
    """Build the query for all facts about the controller's nodes, one line each."""
    return ["scontrol", "--oneliner", "show", "nodes"]


def scontrol_show_partitions_command(*, hide: bool = False) -> list[str]:
    """Build the query for all partitions, one line each; ``hide``: only those that this user is shown."""
    return ["scontrol", "--oneliner", *(["--hide"] if hide else []), "show", "partitions"]


def _checked(job_id: str) -> str:
    if not JOB_ID.fullmatch(job_id):
        raise ClusterError(
            f"job id {job_id!r}: expected a number such as 123, or 123_4 of an array"
        )
    return job_id


TIMED_OUT = 124
NOT_FOUND = 127


@dataclass(frozen=True)
class Completed:
    """The result of a program: ``returncode`` is 124 after a timeout, 127 if it is not installed."""

    returncode: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str], timeout: float = 10.0, environ: Mapping[str, str] | None = None
) -> Completed:
    """Run a program to its end and return its output; no other function runs Slurm's programs.

    It never raises: a missing program, or a program slower than ``timeout`` seconds, gives a return
    code (127, 124) with a line in ``stderr``.
    Args:
        argv: program and arguments; no shell sees them.
        timeout: seconds before it is killed. squeue takes 18 s to notice a dead controller.
        environ: the exact environment (for sbatch, which passes it to the job). None: that of this
            process, without the user's defaults that would change the answer.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            # A second Ctrl-C must not end the scancel that the first Ctrl-C caused.
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
    """Drop variables that change an answer (SQUEUE_STATES, SLURM_CLUSTERS); fix language and time format.

    The answers include hidden partitions, in which Slurm shows no node and no step otherwise.
    """
    changing = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_", "SINFO_", "SLURM_CLUSTERS")
    kept = {name: value for name, value in environ.items() if not name.startswith(changing)}
    everything = dict.fromkeys(("SCONTROL_ALL", "SINFO_ALL", "SQUEUE_ALL"), "1")
    return kept | everything | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


def configured(timeout: float = 3.0) -> bool:
    """Return True if jobs go to Slurm here: sbatch is on PATH and has a configured cluster.

    The controller may be slow or unreachable: a user of a cluster does not want to compute on its login host.
    """
    if shutil.which("sbatch") is None:
        return False
    return "configuration source" not in run(["scontrol", "ping"], timeout=timeout).stderr


def cluster_name(timeout: float = 6.0) -> str | None:
    """Return the name of this host's cluster; None if no controller answers."""
    return parse_cluster_name(show_config(timeout))


def show_config(timeout: float = 6.0) -> str:
    """Return the text of ``scontrol show config``; empty if no controller answers."""
    return run(["scontrol", "show", "config"], timeout=timeout).stdout


def parse_cluster_name(text: str) -> str | None:
    """Read ``ClusterName`` from the output of ``scontrol show config``; None if it is missing."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
    return found and found[1]


OLDEST = "21.08"
"""The oldest Slurm whose options and answers hpcrun knows."""


def parse_old_version(text: str) -> str | None:
    """Read the version from the output of ``scontrol show config``; None if it is `OLDEST` or newer."""
    found = re.search(r"^SLURM_VERSION\s*=\s*((\d+\.\d+)\S*)", text, re.MULTILINE)
    return found[1] if found and float(found[2]) < float(OLDEST) else None


_LONG_NAMES = NAMES["sbatch"] | NAMES["srun"]


def given_option(arguments: Sequence[str], long: str, short: str | None = None) -> str | None:
    """Return the value that the last of these options gives to ``--long`` or ``-short``.

    An option without a value has "". None: the option is not given. Slurm accepts the first letters of a
    long name, but no name of another option: `--mem` is not short for `--mem-per-cpu`.
    """
    found = None
    for argument in arguments:
        name, _, value = argument.replace("=", " ", 1).partition(" ")
        is_short = len(name) > 4 and f"--{long}".startswith(name) and name[2:] not in _LONG_NAMES
        if name == f"--{long}" or is_short:
            found = value
        elif short and argument.startswith(f"-{short}") and not argument.startswith("--"):
            found = argument[2:].lstrip(" =")
    return found
