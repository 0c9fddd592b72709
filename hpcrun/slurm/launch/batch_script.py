"""The batch script of a Slurm job, as text. A dry run prints the same script that a submission sends."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.config import Config, Job, submit_options
from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory, shows_owners
from hpcrun.run.files import digest_of, with_comment_crc
from hpcrun.slurm.commands import given_option

_DIGITS = 3


@dataclass(frozen=True)
class ArrayTasks:
    """The tasks of a Slurm job array, each an element of a sweep.

    The index of a task is the name of its element, so that a person finds job 123_7 in ``SWEEP/007``.
    ``at_once``: tasks that may run at the same time; None: as many as Slurm starts. ``submitted``: the digest
    of the config of each index, or none.
    """

    indices: Sequence[int]
    at_once: int | None = None
    submitted: Sequence[str] = ()

    @property
    def option(self) -> str:
        """The value of sbatch's ``--array``, such as ``0-3,7%2``."""
        limit = "" if self.at_once is None else f"%{self.at_once}"
        spans: list[list[int]] = []
        for index in self.indices:
            if spans and index == spans[-1][1] + 1:
                spans[-1][1] = index
            else:
                spans.append([index, index])
        return ",".join(f"{one}-{end}" if one != end else f"{one}" for one, end in spans) + limit

    @property
    def digests(self) -> list[str]:
        """Lines of bash that make the array ``submitted``."""
        given = [
            f"[{index}]={one}" for index, one in zip(self.indices, self.submitted, strict=True)
        ]
        rows = [" ".join(given[start : start + 3]) for start in range(0, len(given), 3)]
        return ["submitted=(", *rows, ")"]

    @property
    def shell_name(self) -> str:
        """Shell expression for the name of the element in the batch script."""
        return f'$(printf %0{_DIGITS}d "$SLURM_ARRAY_TASK_ID")'

    @property
    def pattern(self) -> str:
        """The name of the element in Slurm's file names (sbatch(1), "filename pattern")."""
        return f"%{_DIGITS}a"


def element_name(number: int) -> str:
    """Return the name of the element with this number: 000, 001, … 999, 1000."""
    return f"{number:0{_DIGITS}d}"


@dataclass(frozen=True)
class BatchRequest:
    """The inputs of a batch script. ``python``: the interpreter of the batch step.

    ``array``: the tasks of a sweep; ``run`` is then the folder of the sweep. ``submitted``: the digest of the
    run's config; empty: not known. ``owners``: False if the file system shows all files as another user's.
    """

    run: Path
    job: Job
    python: str
    array: ArrayTasks | None = None
    submitted: str = ""
    owners: bool = True


# Slurm and submitit replace a % with a letter anywhere in a path by their own numbers. srun does
# so twice, so doubling the sign does not help, and Slurm 26.05 and later halve a doubled sign twice. A
# backslash switches Slurm's replacement off, in the name of the log too.
_UNUSABLE = re.compile(r"%[0-9]*[A-Za-z]|%%|[\\\n]")

# An interpreter that does not start (a file server is away, for example) can neither classify nor requeue.
# A file in the run's folder counts these starts, one line each; the step removes it when it begins.
# The scripts in sbatch/ have the same lines: Slurm runs a copy of a script, which finds no other file.
STEP_LOOP = """\
# Starts the ranks of the run, finds the cause of their end, requeues this job if the policy allows it.
runs() {{ [[ $(scontrol show job "{job}") = *JobState=RUNNING*" Restarts=${{SLURM_RESTART_COUNT:-0}} "* ]]; }}
trap 'stopped=1' TERM; trap : USR2; unstarted={unstarted}$SLURM_JOB_ID
for pause in 5 15 0; do
    stopped=; echo "$SLURMD_NODENAME" >> "$unstarted"
    {step}; code=$?
    # The step has handled the end, or Slurm ends the job. At a reboot of the node the job still runs.
    if [ ! -e "$unstarted" ] || {{ [ -n "$stopped" ] && ! runs; }}; then exit $code; fi
    sleep $pause
done
# The interpreter did not start. Requeue at most twice, perhaps onto another node.
if [[ "$(wc -l < "$unstarted")" = [36] ]] && runs; then scontrol requeue "{job}"; fi
exit $code"""

_OWNER = """\
    # Who may write to the parent folder may have put another folder in the place of the run.
    if [ -e {run} ] && [ ! -O {run} ]; then echo "hpcrun: the run is another user's" >&2; exit 2; fi"""

# The number of the array is also that of one of its tasks: requeued by it, all tasks would start again.
_ARRAY_JOB = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"


def batch_request(
    run: RunDirectory,
    config: Config,
    avoid: Sequence[str] = (),
    array: ArrayTasks | None = None,
    submitted: str = "",
) -> BatchRequest:
    """Return the parts of the Slurm script of ``run``, or of the ``array`` of the sweep in that folder.

    Args:
        avoid: nodes to exclude.
        submitted: the digest of the run's config, without which the job starts with any config of this user.
    """
    return BatchRequest(
        run=run.path,
        job=_leaving_out(config.job.model_copy(update={"warn_signal": config.warn_signal}), avoid),
        # Outside the container, on the batch host: it talks to Slurm.
        python=sys.executable,
        array=array,
        submitted=submitted,
        owners=shows_owners(run.path),
    )


def submitted_digest(config_text: str) -> str:
    """Return the digest of the config file that a submission writes: ``config_text`` with a checksum."""
    return digest_of(with_comment_crc(config_text).encode())


def _leaving_out(job: Job, nodes: Sequence[str]) -> Job:
    if not nodes:
        return job
    given = [job.exclude] if job.exclude else []
    return job.model_copy(update={"exclude": ",".join([*given, *nodes])})


def batch_script(request: BatchRequest) -> str:
    """Return the script: options for sbatch, and the call of the batch step.

    Raises:
        LaunchError: the path of the run contains characters with a special meaning for Slurm or submitit.
    """
    unusable = _UNUSABLE.search(str(request.run))
    if unusable:
        raise LaunchError(
            f"{request.run}: Slurm and submitit replace {unusable.group()!r} in a path by other text; "
            "choose a path without it, in full: --runs-dir /FOLDER"
        )
    lines = [
        "#!/bin/bash",
        *sbatch_lines(request.run, request.job, request.array),
        "",
        *_step_lines(request),
    ]
    return "\n".join(lines) + "\n"


def _step_lines(request: BatchRequest) -> list[str]:
    step = [request.python, "-m", "hpcrun", "batch"]
    unstarted = RunDirectory(request.run).unstarted("")
    if request.array is None:
        run, job, lines = shlex.quote(str(request.run)), "$SLURM_JOB_ID", []
        begun = shlex.quote(f"{unstarted}")
    else:
        run, job = '"$run"', _ARRAY_JOB
        folder = shlex.quote(f"{request.run}/")
        lines = [
            "# Each task of the array has a run directory.",
            f"run={folder}{request.array.shell_name}",
        ]
        begun = f'"$run"/{unstarted.name}'
    words = f"{shlex.join(step)} {run}"
    if request.submitted:
        words += f" --submitted={request.submitted}"
    if request.array is not None and request.array.submitted:
        lines += ["# The hash of the config of each run.", *request.array.digests]
        words += ' --submitted="${submitted[$SLURM_ARRAY_TASK_ID]}"'
    head, loop, rest = STEP_LOOP.partition("do\n")
    text = f"{head}{loop}{_OWNER}\n{rest}" if request.owners else STEP_LOOP
    return lines + [
        line.format(step=words, unstarted=begun, job=job, run=run) for line in text.splitlines()
    ]


def sbatch_lines(folder: Path, job: Job, array: ArrayTasks | None = None) -> list[str]:
    """Return the ``#SBATCH`` lines of a job with its run directory at ``folder``; see sbatch(1).

    Args:
        array: the tasks of the sweep in ``folder``, each with its run directory in it.
    """
    run = RunDirectory(folder)
    options: dict[str, object] = {
        "job-name": run.name.replace("/", "-"),
        "array": array.option if array is not None else None,
        "nodes": job.nodes if job.elastic else job.max_nodes + job.spares,
        **_task_options(job),
        **_gpu_options(job),
        "cpus-per-task": job.cpus_of_task,
        "time": job.time,
        **{
            option.sbatch: getattr(job, key)
            for key, (option, _) in submit_options(type(job)).items()
            if option.sbatch
        },
        # Slurm sends it to the steps, not to the batch shell, and perhaps a minute early.
        "signal": f"{job.warn_signal}@{job.signal_lead}",
        "output": _output(run, array),
        # A restart must not truncate earlier output.
        "open-mode": "append",
    }
    # A switch has no value.
    lines = [
        f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={_quoted(value)}"
        for key, value in options.items()
        if value
    ]
    # Sites with JobRequeue=0 refuse a requeue without this option.
    lines.append("#SBATCH --requeue")
    return lines + [f"#SBATCH {_quoted_option(option)}" for option in job.sbatch_args]


def _output(run: RunDirectory, array: ArrayTasks | None) -> str:
    """Return the file for the batch script's output; its name contains the job id as squeue prints it."""
    # In Slurm's file names % starts a field.
    folder = str(run.path).replace("%", "%%")
    if array is None:
        return f"{folder}/{run.logs.name}/batch-%j.log"
    return f"{folder}/{array.pattern}/{run.logs.name}/batch-%A_%a.log"


def _task_options(job: Job) -> dict[str, object]:
    """Return the request for the CPUs of a node's tasks.

    With a range of nodes, only srun gets the number of tasks. With --ntasks-per-node, Slurm 22.05 records
    their sum at a start, and the requeued job waits until it has as many nodes again.
    """
    if not job.elastic:
        return {"ntasks-per-node": job.tasks_on_node}
    return {"mincpus": job.tasks_on_node * (job.cpus_of_task or 1)}


def _gpu_options(job: Job) -> dict[str, object]:
    """Return the request for GPUs; ``auto`` is the form that most sites accept."""
    if job.cpu or job.gpu_request == "none":
        return {}
    kind = f"{job.gpu_type}:" if job.gpu_type else ""
    if job.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{job.gpus}"}
    return {"gpus-per-node": f"{kind}{job.gpus}"}


def job_name(run: RunDirectory, job: Job) -> str:
    """Return the name under which Slurm lists the job."""
    return given_option(job.sbatch_args, "job-name", "J") or run.name.replace("/", "-")


def _quoted(value: object) -> str:
    """Quote ``value`` for sbatch, which strips quotes and backslashes itself; # starts a comment there."""
    text = str(value)
    if text and not any(character in text for character in " \t'\"\\#"):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _quoted_option(option: str) -> str:
    name, separator, value = option.partition("=")
    return f"{name}={_quoted(value)}" if separator else name
