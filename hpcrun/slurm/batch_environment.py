"""The variables of a batch job: its own, and those that sbatch has passed on from its caller.

srun reads many variables as options. A job that a task of another job has submitted would bind its ranks to
the CPUs of that task (SLURM_CPU_BIND), or place the ranks in its order (SLURM_DISTRIBUTION).
"""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcrun.slurm.commands import given_option

# Variables of another step, and choices that hpcrun or the step makes itself, such as the exported variables.
_NEVER = ("SLURM_STEP", "SLURM_MEM_", "SLURM_CPU_BIND", "SLURM_EXPORT_ENV")
# A person may set these two for srun.
_BINDINGS = ("SLURM_CPU_BIND", "SLURM_MEM_BIND")
_RANK = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_KINDS = {
    "SLURM_ARRAY_JOB_ID": "ArrayJobId",
    "SLURM_ARRAY_TASK_ID": "ArrayJobId",
    "SLURM_HET_SIZE": "HetJobId",
    "SLURM_HET_JOB_ID": "HetJobId",
}
# Only the tasks of a step have these; recorded with 22.05 and 26.05.
_OF_A_STEP = ("SLURM_SRUN_COMM_HOST", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_STEP_NODELIST")
# Variables that sbatch sets for one of these options, and that srun reads (srun(1), "input environment
# variables").
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "SLURM_CORE_SPEC": ("core-spec", "S"),
    "SLURM_CPUS_PER_GPU": ("cpus-per-gpu",),
    "SLURM_CPUS_PER_TASK": ("cpus-per-task", "c", "cpus-per-gpu"),
    "SLURM_CPU_FREQ_REQ": ("cpu-freq",),
    "SLURM_DISTRIBUTION": ("distribution", "m"),
    "SLURM_EXCLUSIVE": ("exclusive",),
    "SLURM_GPUS": ("gpus", "G"),
    "SLURM_GPUS_PER_NODE": ("gpus-per-node",),
    "SLURM_GPUS_PER_SOCKET": ("gpus-per-socket",),
    "SLURM_GPUS_PER_TASK": ("gpus-per-task",),
    "SLURM_GPU_BIND": ("gpu-bind", "ntasks-per-gpu"),
    "SLURM_GPU_FREQ": ("gpu-freq",),
    "SLURM_HINT": ("hint",),
    "SLURM_NETWORK": ("network",),
    "SLURM_NO_KILL": ("no-kill", "k"),
    "SLURM_NTASKS_PER_CORE": ("ntasks-per-core",),
    "SLURM_NTASKS_PER_GPU": ("ntasks-per-gpu",),
    "SLURM_NTASKS_PER_NODE": ("ntasks-per-node", "tasks-per-node"),
    "SLURM_NTASKS_PER_SOCKET": ("ntasks-per-socket",),
    "SLURM_OPEN_MODE": ("open-mode",),
    "SLURM_OVERCOMMIT": ("overcommit", "O"),
    "SLURM_PROFILE": ("profile",),
    "SLURM_SPREAD_JOB": ("spread-job",),
    "SLURM_THREADS_PER_CORE": ("threads-per-core", "hint", "extra-node-info", "B"),
    "SLURM_TRES_BIND": ("tres-bind", "gpu-bind", "gpus-per-task", "ntasks-per-gpu"),
    "SLURM_TRES_PER_TASK": ("tres-per-task", "cpus-per-task", "c", "gpus-per-task"),
}
# Options of srun only: sbatch sets none of these variables.
_SRUN_ONLY = frozenset(
    f"SLURM_{name}"
    for name in (
        *("EXACT", "IMMEDIATE", "KILL_BAD_EXIT", "LABELIO", "MPI_TYPE", "OVERLAP"),
        *("REMOTE_CWD", "RESV_PORTS", "STDERRMODE", "STDINMODE", "STDOUTMODE", "TASK_EPILOG"),
        *("TASK_PROLOG", "TIMELIMIT", "UNBUFFEREDIO", "WAIT", "WORKING_DIR"),
    )
)
_OF_PLACEMENT = frozenset(
    f"SLURM_{name}"
    for name in ("DISTRIBUTION", "GPU_BIND", "HINT", "THREADS_PER_CORE", "TRES_BIND")
)
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Origin:
    """The origin of a batch script's variables.

    Attributes:
        given: the environment with which Slurm has started the script; None: unknown, so every variable
            counts as given. A variable with another value now is the script's own.
        lines: the words of the script's ``#SBATCH`` lines.
    """

    given: Mapping[str, str] | None = None
    lines: list[str] = field(default_factory=list)


def origin_of_script(shell: int) -> Origin:
    """Return the origin of the variables of the batch script that runs in the process ``shell``."""
    try:
        entries = Path(f"/proc/{shell}/environ").read_bytes().split(b"\0")
        words = Path(f"/proc/{shell}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return Origin()
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    given = {name: value for name, _, value in pairs}
    script = next((os.fsdecode(word) for word in words[1:] if word.startswith(b"/")), None)
    return Origin(given, [] if script is None else _sbatch_words(Path(script)))


def _sbatch_words(script: Path) -> list[str]:
    try:
        with script.open("rb") as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return []
    lines = (line.removeprefix("#SBATCH") for line in text.splitlines() if line[:7] == "#SBATCH")
    return [word for line in lines for word in _words(line)]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def own_variables(
    environ: Mapping[str, str], job: Mapping[str, str], origin: Origin | None = None
) -> dict[str, str]:
    """Return ``environ`` without the variables by which another job would be taken for this one.

    sbatch passes the environment of its caller on, which may be a task of another job.

    Args:
        environ: the environment of the batch script.
        job: the fields of ``scontrol show job``; empty if no controller answers.
        origin: the origin of the variables.
    """
    origin = origin or Origin()
    own = {
        name: value
        for name, value in environ.items()
        if name not in _RANK and (not name.startswith(_NEVER) or name in _BINDINGS)
    }
    for name in inherited_options(environ, job, origin):
        own.pop(name, None)
    if job:
        own = {name: own[name] for name in own if _KINDS.get(name, "JobId") in job}
        if job.get("Restarts", "").isdecimal() and "SLURM_RESTART_COUNT" in own:
            own["SLURM_RESTART_COUNT"] = job["Restarts"]
    return own


def inherited_options(
    environ: Mapping[str, str], job: Mapping[str, str], origin: Origin
) -> list[str]:
    """Return the variables of ``environ`` that srun would take as options, and that no option has set.

    Args:
        environ: the environment of the batch script.
        job: as for :func:`own_variables`.
        origin: the origin of the variables.
    """
    names = (*_BINDINGS, *_OPTIONS, *sorted(_SRUN_ONLY))
    return [
        name
        for name in names
        if name in environ
        and not _is_of_script(name, environ, origin)
        and not _is_own_option(name, environ, job, origin)
    ]


def _is_of_script(name: str, environ: Mapping[str, str], origin: Origin) -> bool:
    """Return True if the script has set the variable itself."""
    return origin.given is not None and origin.given.get(name) != environ[name]


def _is_own_option(
    name: str, environ: Mapping[str, str], job: Mapping[str, str], origin: Origin
) -> bool:
    """Return True if an option of this job may have set the variable, or a person for srun."""
    given = environ if origin.given is None else origin.given
    in_a_step = any(marker in given for marker in _OF_A_STEP)
    if name in _SRUN_ONLY:
        return not in_a_step
    if name in _BINDINGS:
        # A person may set them in the batch script. In a task Slurm sets them together with a type.
        return origin.given is None and f"{name}_TYPE" not in environ and not in_a_step
    if name == "SLURM_CPUS_PER_TASK" and "CPUs/Task" in job:
        return job["CPUs/Task"] == environ[name]
    if name.replace("SLURM_", "SBATCH_") in given:
        return True
    line = job.get("SubmitLine")
    words = [*origin.lines, *(_sbatch_options(line) if line else [])]
    if any(_given(words, option) for option in _OPTIONS[name]):
        return True
    # Without the line of the submission (as in 22.05), the options are unknown. srun in a step sets these.
    return line is None and not (in_a_step and name in _OF_PLACEMENT)


def _given(words: list[str], option: str) -> bool:
    if len(option) > 1:
        return given_option(words, option) is not None
    return any(word.startswith(f"-{option}") for word in words)


def _sbatch_options(line: str) -> list[str]:
    """Return the options of sbatch in its command line, and perhaps words of its script's arguments."""
    return [word for word in _words(line) if word.startswith("-")]
