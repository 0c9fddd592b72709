"""Submission from Python."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, overload

from hpcrun.api.places import runs_folder
from hpcrun.api.run import Run, carry_out, refusing
from hpcrun.api.submission.choose_config import SubmitRequest
from hpcrun.api.submission.plan import plan_submission
from hpcrun.api.sweeps.handle import Sweep
from hpcrun.api.sweeps.handover import submit_sweep
from hpcrun.api.sweeps.plan import plan_sweep
from hpcrun.api.sweeps.request import sweep_request
from hpcrun.config import Layer, flag_layer
from hpcrun.errors import UserError
from hpcrun.job.finalize import finalize
from hpcrun.job.scheduler_view import Ending
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, job_of_process, record_event
from hpcrun.slurm.environment import scrub
from hpcrun.worker import train_here

if TYPE_CHECKING:
    from typing_extensions import Unpack


_PLACE = "overrides"


class _Options(TypedDict, total=False):
    """The arguments of :func:`submit` for a run and for a sweep, for type checkers."""

    task: str | None
    command: Sequence[str | os.PathLike[str]] | None
    overrides: Mapping[str, Any] | None
    name: str | None
    runs_dir: str | os.PathLike[str] | None
    nodes: int | None
    gpus: int | str | None
    tasks_per_node: int | None
    launcher: str | None
    cpu: bool | None
    time: str | int | None
    cluster: str | None
    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    reservation: str | None
    exclude: str | None
    exclusive: bool | None
    mem: str | None
    cpus_per_task: int | None
    executor: str | None
    after: Sequence[str | os.PathLike[str]]
    profile: str | None
    from_scratch: bool
    snapshot: bool
    trust_owner: bool
    max_parallel: int | None
    pack: int | None


@overload
def submit(
    config: str | os.PathLike[str] | None = None,
    *,
    sweep: None = None,
    sweep_file: None = None,
    **options: "Unpack[_Options]",
) -> Run: ...


@overload
def submit(
    config: str | os.PathLike[str] | None = None,
    *,
    sweep: Mapping[str, Iterable[Any]] | None = None,
    sweep_file: str | os.PathLike[str] | None = None,
    **options: "Unpack[_Options]",
) -> Sweep: ...


@refusing
def submit(
    config: str | os.PathLike[str] | None = None,
    *,
    task: str | None = None,
    command: Sequence[str | os.PathLike[str]] | None = None,
    overrides: Mapping[str, Any] | None = None,
    name: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    nodes: int | None = None,
    gpus: int | str | None = None,
    tasks_per_node: int | None = None,
    launcher: str | None = None,
    cpu: bool | None = None,
    time: str | int | None = None,
    cluster: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    constraint: str | None = None,
    reservation: str | None = None,
    exclude: str | None = None,
    exclusive: bool | None = None,
    mem: str | None = None,
    cpus_per_task: int | None = None,
    executor: str | None = None,
    after: Sequence[str | os.PathLike[str]] = (),
    profile: str | None = None,
    from_scratch: bool = False,
    snapshot: bool = True,
    trust_owner: bool = False,
    sweep: Mapping[str, Iterable[Any]] | None = None,
    sweep_file: str | os.PathLike[str] | None = None,
    max_parallel: int | None = None,
    pack: int | None = None,
) -> Run | Sweep:
    """Start a training, or continue it where it stopped, as ``hpcrun submit --detach`` does.

    The call returns after the submission: :meth:`Run.wait` waits for the end. With
    ``executor="debug"`` one rank trains in this process, and the call returns after the training. A finished
    run of that name stays as it is. Remarks go to standard error. Most arguments are options of sbatch(1).

    With ``sweep`` or ``sweep_file`` the call submits a run for each combination of values, and returns a
    :class:`hpcrun.Sweep`. The same call again submits what is missing or failed.

    Args:
        config: a YAML or JSON file. Without a file, a task and a command: the quick start.
        task: a built-in task or ``module:Class``, instead of the config's task.
        command: the words of a program that each task runs, such as ``["python", "train.py"]``.
        overrides: values of the config by dotted key, such as ``{"train.lr": 3e-4}``.
        name: the name of the run; None: the config's, or that of the file, task or script, or numbered.
        runs_dir: the folder of the runs; None: ``$HPCRUN_RUNS``, else ``./runs``.
        nodes: number of nodes.
        gpus: GPUs per node (``4``, ``"a100:4"``), with one rank each; on the CPU, ranks per node.
        tasks_per_node: tasks on a node, for a command that starts the ranks itself.
        launcher: ``torchrun`` or ``accelerate`` starts the ranks of the command.
        cpu: train on the CPU.
        time: time limit as ``"HH:MM:SS"``, or in minutes.
        cluster: Slurm cluster, where there are several.
        partition: Slurm partition.
        account: Slurm account to charge.
        qos: Slurm quality of service.
        constraint: features that each node has.
        reservation: Slurm reservation.
        exclude: nodes to exclude, as a host list.
        exclusive: share the nodes with no other job.
        mem: memory of a node, such as ``"64G"``.
        cpus_per_task: CPU cores of a rank.
        executor: ``auto``, ``slurm``, ``local`` or ``debug``; None: the config's.
        after: runs that must finish first.
        profile: a site profile, by name or path; ``""`` for none, None for the default.
        from_scratch: begin at step 0; checkpoints, metrics and events move to the old job's log folder.
        snapshot: run a copy of the code, so that later changes do not affect the job.
        trust_owner: continue a run of another user.
        sweep: the values of each swept key, such as ``{"train.lr": [1e-4, 3e-4], "seed": range(3)}``.
            ``command`` contains the keys as ``{lr}`` and ``{seed}``.
        sweep_file: a YAML or JSON file with the blocks grid, zip, list, random and where.
        max_parallel: runs of the sweep at the same time, at most.
        pack: small runs of the sweep that share one job and its GPU.

    Returns:
        The run, or the sweep.

    Raises:
        UserError: an argument or the config is wrong, a job has the run already, or the scheduler refuses;
            nothing has changed. The text has one line for each problem.
        KeyboardInterrupt: Ctrl-C during the call; nothing has changed, or the text names the job that stays.
    """
    flags: dict[str, Any] = {
        "nodes": nodes,
        "gpus": gpus,
        "tasks_per_node": tasks_per_node,
        "launcher": launcher,
        "cpu": cpu,
        "time": None if time is None else str(time),
        "cluster": cluster,
        "partition": partition,
        "account": account,
        "qos": qos,
        "constraint": constraint,
        "reservation": reservation,
        "exclude": exclude,
        "exclusive": exclusive,
        "mem": mem,
        "cpus_per_task": cpus_per_task,
        "executor": executor,
        "name": name,
    }
    runs = runs_folder(runs_dir)
    request = SubmitRequest(
        file=None if config is None else Path(config),
        overrides=_overrides(overrides, task),
        flags={flag: (value, f"{flag}=") for flag, value in flags.items() if value is not None},
        command=_words("command", command),
        command_place="command=",
        profile=profile,
        runs=runs,
    )
    if sweep is not None or sweep_file is not None:
        if from_scratch:
            raise UserError(
                "from_scratch= is for one run; in a sweep use Run.resume(from_scratch=True)"
            )
        plan_of_sweep = plan_sweep(
            request,
            sweep_request(sweep, sweep_file),
            at_once=_whole("max_parallel", max_parallel),
            snapshot=snapshot,
            pack=_whole("pack", pack) or 1,
        )
        waits_for = plan_of_sweep.waits_for(_words("after", after), runs)
        submit_sweep(plan_of_sweep, waits_for, trust_owner=trust_owner)
        return Sweep(plan_of_sweep.folder)
    for name_of_option, given in (("max_parallel", max_parallel), ("pack", pack)):
        if given is not None:
            raise UserError(f"{name_of_option}=: is for sweeps only; give sweep= or sweep_file=")
    plan = plan_submission(request, scratch=from_scratch, snapshot=snapshot)
    if plan.finished is None:
        carry_out(plan, _words("after", after), runs, trust_owner=trust_owner)
    return Run(plan.run)


def _whole(option: str, given: int | None) -> int | None:
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    raise UserError(f"{option}={given!r}: should be a whole number, 1 or more")


def _overrides(values: Mapping[str, Any] | None, task: str | None) -> Layer:
    """Return the layer of ``overrides=`` and ``task=``; ``task=`` takes precedence.

    Raises:
        UserError: ``values`` has no dotted keys.
    """
    given: dict[str, tuple[Any, str]] = {}
    if values is not None and not isinstance(values, Mapping):
        raise UserError(f"{_PLACE}=: give a dict, such as {_PLACE}={{'train.lr': 3e-4}}")
    for key, value in (values or {}).items():
        if not isinstance(key, str) or not all(part.strip() for part in key.split(".")):
            raise UserError(f"{_PLACE}=: {key!r} is not a key; write it as 'section.key'")
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        given[key] = (plain, f"{_PLACE}=")
    if task is not None:
        given["task"] = (task, "task=")
    return flag_layer(given)


def _words(option: str, given: Sequence[str | os.PathLike[str]] | None) -> list[str]:
    """Return ``given`` as a list of text.

    Raises:
        UserError: ``given`` is one text, or a member is not text.
    """
    if isinstance(given, str):
        raise UserError(f"{option}=: give a list of words: {option}={given.split()!r}")
    words = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in given or ()]
    for word in words:
        if not isinstance(word, str):
            raise UserError(f"{option}=: {word!r} is not text; write it as {str(word)!r}")
    if given is not None and option == "command" and not words:
        raise UserError("command=: has no words; name a program, or omit command=")
    return words


_INTERRUPTED = 130


def run_here(run: RunDirectory) -> int:
    """Train ``run`` in this process and return its exit code.

    Afterwards the environment and the signal handlers are restored.
    """
    before = dict(os.environ)
    try:
        with _same_handlers():
            return _run_here(run)
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _same_handlers() -> Iterator[None]:
    """Restore the signal handlers that the block has changed.

    Python sets handlers in the main thread only; in other threads this function does nothing.
    """
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                # None: C code installed the handler, and Python cannot restore it.
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _run_here(run: RunDirectory) -> int:
    for name in os.environ.keys() - scrub(os.environ).keys():
        del os.environ[name]
    attempt = Attempt(job_of_process(run, os.getpid()), 0)
    record_event(run, "submitted", executor="debug", job=attempt.job)
    try:
        return train_here(run.path)
    except KeyboardInterrupt:
        finalize(run, attempt, _INTERRUPTED, None, Ending("cancelled"))
        raise
