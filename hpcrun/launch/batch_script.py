"""The batch script of a Slurm job, as text. A dry run prints it and a submission sends the same one."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hpcrun.cluster.environment import export_lines
from hpcrun.config import Job
from hpcrun.launch.errors import LaunchError
from hpcrun.run.directory import RunDirectory


@dataclass(frozen=True)
class BatchRequest:
    """What a batch script is made of. ``worker``: the command that each task runs."""

    run: Path
    job: Job
    python: str
    worker: tuple[str, ...]


# Slurm and submitit put their numbers in for a % with a letter wherever it stands in a path; srun does
# so twice, so that doubling the sign does not help. A backslash switches Slurm's off, in the name of the
# log too.
_UNUSABLE = re.compile(r"%[0-9]*[A-Za-z]|[\\\n]")


def batch_script(request: BatchRequest) -> str:
    """The script: options, environment, one srun with a task per GPU, and what follows its end.

    Raises:
        LaunchError: the run lies at a path that Slurm or submitit would read otherwise.
    """
    unusable = _UNUSABLE.search(str(request.run))
    if unusable:
        raise LaunchError(
            f"{request.run}: Slurm and submitit give {unusable.group()!r} in a path a meaning of their "
            "own; choose a place without it, by its full path: --runs-dir /FOLDER"
        )
    blocks = [
        ["#!/bin/bash", *sbatch_lines(request)],
        _guard_lines(request),
        list(request.job.setup),
        export_lines(request.job.env),
        ["# Only from here: module and conda read variables that are not set.", "set -u"],
        _attempt_lines(request),
        _srun_lines(request),
        _settle_lines(request),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def sbatch_lines(request: BatchRequest) -> list[str]:
    """The ``#SBATCH`` lines; see sbatch(1) for each option."""
    job, run = request.job, RunDirectory(request.run)
    options: dict[str, object] = {
        "job-name": run.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.gpus,
        "gpus-per-node": None if job.cpu else job.gpus,
        "cpus-per-task": job.cpus_per_task,
        "mem": job.mem,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "reservation": job.reservation,
        "exclude": job.exclude,
        # To the steps, not the batch shell; may arrive up to a minute early.
        "signal": f"USR2@{job.signal_lead}",
        # In Slurm's file names % starts a field.
        "output": str(run.logs).replace("%", "%%") + "/batch-%j.log",
        # A restart must not truncate what came before.
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{key}={_quoted(value)}" for key, value in options.items() if value]
    # Sites with JobRequeue=0 refuse a requeue otherwise.
    lines.append("#SBATCH --requeue")
    if job.exclusive:
        lines.append("#SBATCH --exclusive")
    return lines + [f"#SBATCH {_quoted_option(option)}" for option in job.sbatch_args]


def _guard_lines(request: BatchRequest) -> list[str]:
    settle = shlex.join([request.python, "-m", "hpcrun", "settle", str(request.run)])
    return [
        "# A command that fails ends the job. Before the ranks start, the run hears which, with its words:",
        "# those that follow this line in the log.",
        "set -e",
        'echo "hpcrun: attempt ${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}'
        "${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
        '-${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"',
        "unprepared() {",
        "    code=$?",
        "    trap '' TERM USR2",
        f'    {settle} --exit-code "$code" --setup "$1"',
        "    exit $?",
        "}",
        "trap 'unprepared \"$BASH_COMMAND\"' EXIT",
    ]


def _attempt_lines(request: BatchRequest) -> list[str]:
    return [
        f"RUN={shlex.quote(str(request.run))}",
        "# An array element is requeued, and so named, ARRAY_TASK; a restart keeps its job id.",
        "job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}",
        "restart=${SLURM_RESTART_COUNT:-0}",
        'attempt="$RUN/logs/$job/restart-$restart"',
        'mkdir -p "$attempt"',
        "# submitit's way of telling its tasks who runs them.",
        "export SUBMITIT_EXECUTOR=slurm",
        # Not the one that the set-up may have made its own.
        'case "$(trap -p EXIT)" in *unprepared*) trap - EXIT ;; esac',
    ]


def _srun_lines(request: BatchRequest) -> list[str]:
    job = request.job
    options = ["--kill-on-bad-exit=1", "--unbuffered"]
    if job.cpus_per_task:
        # Since 22.05 srun does not inherit this from sbatch.
        options.append(f"--cpus-per-task={job.cpus_per_task}")
    options += [shlex.quote(option) for option in job.srun_args]
    worker = shlex.join(request.worker)
    return [
        "# Slurm signals this shell too: with a trap it lives on until srun has ended.",
        "trap : TERM USR2",
        "code=0",
        f'srun {" ".join(options)} --output="${{attempt//%/%%}}/rank-%5t.log" \\',
        f"    {worker} || code=$?",
    ]


def _settle_lines(request: BatchRequest) -> list[str]:
    settle = shlex.join([request.python, "-m", "hpcrun", "settle"])
    return [
        "# Finds the cause, writes it down, and requeues the job where the policy says so. A signal",
        "# that comes now has nothing left to stop.",
        "trap '' TERM USR2",
        "verdict=0",
        f'{settle} "$RUN" --exit-code "$code" || verdict=$?',
        "# 75: to be requeued, but the program could not (inside a container, or no controller answers).",
        "# Only while Slurm counts no newer start: requeueing then would kill that one.",
        "if [ $verdict -eq 75 ]; then",
        "    for pause in 5 10 20 40 60 0; do",
        '        shown=$(scontrol show job "$job") || shown=',
        '        case "$shown" in',
        '            *" Restarts=$restart "*) if scontrol requeue "$job"; then break; fi ;;',
        "            *Restarts=*) break ;;",
        "        esac",
        "        sleep $pause",
        "    done",
        "fi",
        "# 0 only where the training is done, so that Slurm's own state says the truth.",
        "exit $verdict",
    ]


def _quoted(value: object) -> str:
    """``value`` as sbatch reads it: it strips quotes and backslashes itself, and # starts a comment."""
    text = str(value)
    if text and not any(character in text for character in " \t'\"\\#"):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _quoted_option(option: str) -> str:
    name, separator, value = option.partition("=")
    return f"{name}={_quoted(value)}" if separator else name
