"""The state that a process gets from its parent: what a fork takes over to be like a fresh process.

Standard library without slow modules: every rank imports this file before anything else.
"""

import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
# No library reads these variables at import; they differ between tasks, steps or runs of a job.
_PER_TASK = re.compile(
    r"(SLURM|SLURMD|SRUN|PMI|PMI2|PMIX|SLINGSHOT|PALS|HPCRUN)_\w+|MASTER_ADDR|MASTER_PORT|TMPDIR|SHLVL|_"
    r"|(CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
)
_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_RIGHTS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")
_DEVICES = ("nvidia*", "kfd", "dri/render*")


class ProcessState(NamedTuple):
    """The state that a process inherits.

    ``options``: Python's options with the module; ``arguments``: those of the module. ``limits``: soft and
    hard limit by name. ``ignored``, ``blocked``: numbers of signals. ``fixed``: what a process cannot change.
    """

    python: str
    options: list[str]
    arguments: list[str]
    folder: str
    environ: dict[str, str]
    umask: int
    cpus: list[int]
    limits: dict[str, list[int]]
    ignored: list[int]
    blocked: list[int]
    fixed: dict[str, str]


def own_state() -> ProcessState:
    """Return the state of this process; raises OSError if the working folder is gone."""
    umask = os.umask(0o077)
    os.umask(umask)
    words = sys.orig_argv[1:]
    return ProcessState(
        python=sys.executable,
        options=words[: len(words) - len(sys.argv) + 1],
        arguments=sys.argv[1:],
        folder=os.getcwd(),  # noqa: PTH109, pathlib would be the slowest import here
        environ=dict(os.environ),
        umask=umask,
        cpus=sorted(os.sched_getaffinity(0)),
        limits={name: list(resource.getrlimit(number)) for name, number in _LIMITS.items()},
        ignored=[
            int(number)
            for number in signal.valid_signals()
            if signal.getsignal(number) is signal.SIG_IGN
        ],
        blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        fixed=_fixed(),
    )


def read_state(value: Any) -> ProcessState:
    """Return the state that another process has sent; raises ValueError for anything else."""
    kinds = (str, list, list, str, dict, int, list, dict, list, list, dict)
    if not isinstance(value, list) or [type(part) for part in value] != list(kinds):
        raise ValueError("not the state of a process")
    return ProcessState(*value)


def _fixed() -> dict[str, str]:
    found = {f"{name} of /proc/self/status": text for name, text in _status().items()}
    for space in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"):
        found[f"{space} namespace"] = _link(f"/proc/self/ns/{space}")
    found["root folder"] = _link("/proc/self/root")
    found["nice value"] = str(os.getpriority(os.PRIO_PROCESS, 0))
    found["scheduling policy"] = str(os.sched_getscheduler(0))
    found["oom_score_adj"] = _text("/proc/self/oom_score_adj")
    # access(2) asks the control group of a device, and does not wake the device.
    paths = (path for pattern in _DEVICES for path in Path("/dev").glob(pattern))
    usable = (str(path) for path in paths if os.access(path, os.R_OK | os.W_OK))
    found["list of usable GPUs"] = " ".join(sorted(usable))
    return found


def _status() -> dict[str, str]:
    lines = (line.partition(":") for line in _text("/proc/self/status").splitlines())
    return {name: text.strip() for name, _, text in lines if name in _RIGHTS}


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


def shared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every rank of a node has with the same value."""
    return {name: text for name, text in environ.items() if not _PER_TASK.fullmatch(name)}


def difference(process: ProcessState, wanted: ProcessState) -> str | None:
    """Return the name of something in ``wanted`` that a fork of ``process`` cannot have; None if it can."""
    ours, theirs = shared_variables(process.environ), shared_variables(wanted.environ)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"variable {name}"
    if (process.python, process.options) != (wanted.python, wanted.options):
        return "command line"
    # `python -m` puts the folder on the import path.
    if process.folder != wanted.folder:
        return "working folder"
    for name in sorted(process.fixed.keys() | wanted.fixed.keys()):
        if process.fixed.get(name) != wanted.fixed.get(name):
            return name
    for name, (_, hard) in wanted.limits.items():
        if _less(process.limits[name][1], hard):
            return f"hard limit {name}"
    return None


def _less(limit: int, other: int) -> bool:
    return limit != resource.RLIM_INFINITY and (other == resource.RLIM_INFINITY or limit < other)


def places_of_threads(environ: Mapping[str, str]) -> str | None:
    """Return the first variable by which OpenMP binds threads to CPUs, as known when it is loaded."""
    return next((name for name in _PLACES if environ.get(name)), None)


def take_over(state: ProcessState, changes: Mapping[str, str], streams: Sequence[int]) -> None:
    """Give this process ``state``, but not its blocked signals.

    Args:
        changes: variables that imports have set in this process.
        streams: descriptors for standard input, output and error; closed here.

    Raises:
        OSError, ValueError: the system refuses, for example CPUs that belong to another control group.
    """
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(state.folder)
    os.umask(state.umask)
    for name, (soft, hard) in state.limits.items():
        resource.setrlimit(_LIMITS[name], (soft, hard))
    os.sched_setaffinity(0, state.cpus)
    if sorted(os.sched_getaffinity(0)) != state.cpus:
        raise OSError(f"the system does not allow the CPUs {state.cpus}")
    replace_environment({**state.environ, **changes})
    sys.argv[1:] = state.arguments
    sys.orig_argv[1:] = [*state.options, *state.arguments]
    _take_over_signals(state.ignored)


def replace_environment(environ: Mapping[str, str]) -> None:
    """Replace all variables of this process, also for C code."""
    os.environ.clear()
    os.environ.update(environ)


def _take_over_signals(ignored: Iterable[int]) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        action: Any = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        if number == signal.SIGINT and action is signal.SIG_DFL:
            action = signal.default_int_handler
        signal.signal(number, action)
