"""Submission from Python."""

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from hpcrun.api.add_ons import add_on
from hpcrun.api.open_run import run_at
from hpcrun.api.places import runs_folder
from hpcrun.api.run import Run, carry_out, refusing
from hpcrun.api.submission.choose_config import (
    OPTIONS,
    PYTHON_COMMAND,
    SubmitRequest,
    require_key,
)
from hpcrun.api.submission.plan import plan_submission
from hpcrun.config import Layer, flag_layer
from hpcrun.errors import UserError

if TYPE_CHECKING:
    from hpcrun.api.functions import FunctionRun
    from hpcrun.api.sweeps.handle import Sweep

_PLACE = "overrides"


@dataclass(frozen=True)
class FunctionCall:
    """Calls of one function: default name of the run, hash, words of each rank, and the file of the calls."""

    name: str
    digest: str
    command: list[str]
    files: Mapping[str, bytes]


@overload
def submit(config: Callable[..., object], *arguments: object, **options: Any) -> "FunctionRun": ...


@overload
def submit(
    config: str | os.PathLike[str] | None = None,
    *,
    sweep: None = None,
    sweep_file: None = None,
    **options: Any,
) -> Run: ...


@overload
def submit(
    config: str | os.PathLike[str] | None = None,
    *,
    sweep: Mapping[str, Iterable[object]] | None = None,
    sweep_file: str | os.PathLike[str] | None = None,
    **options: Any,
) -> "Sweep": ...


@refusing
def submit(
    config: str | os.PathLike[str] | Callable[..., object] | None = None,
    *arguments: object,
    task: str | None = None,
    command: "Sequence[str | os.PathLike[str]] | FunctionCall | None" = None,
    overrides: Mapping[str, object] | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    profile: str | None = None,
    snapshot: bool = True,
    sweep: Mapping[str, Iterable[object]] | None = None,
    sweep_file: str | os.PathLike[str] | None = None,
    max_parallel: int | None = None,
    only_new: bool = False,
    **options: object,
) -> "Run | Sweep":
    """Start a training, or continue it where it stopped, as ``hpcrun submit --detach`` does.

    The call returns after the submission: :meth:`Run.wait` waits for the end. With
    ``executor="debug"`` one rank trains in this process, and the call returns after the training. A finished
    run of that name stays as it is. Remarks go to standard error.

    With ``sweep`` or ``sweep_file`` the call submits a run for each combination of values, and returns a
    :class:`hpcrun.Sweep`. The same call again submits what is missing or failed.

    With a function, each rank calls it with ``arguments``: ``submit(train, "a.csv", 3, nodes=2, gpus=4)``.
    The call returns a run whose ``result()`` waits for the value on rank 0.

    Args:
        config: a YAML or JSON file, or a function. Without a file, a task and a command: the quick start.
        arguments: the positional arguments of the function; use functools.partial for keyword arguments.
        task: a built-in task or ``module:Class``, instead of the config's task.
        command: the words of a program that each task runs, such as ``["python", "train.py"]``.
        overrides: values of the config by dotted key, such as ``{"train.lr": 3e-4}``.
        runs_dir: the folder of the runs; None: ``$HPCRUN_RUNS``, else ``./runs``.
        profile: a site profile, by name or path; ``""`` for none, None for the default.
        snapshot: run a copy of the code, so that later changes do not affect the job.
        sweep: the values of each swept key, such as ``{"train.lr": [1e-4, 3e-4], "seed": range(3)}``.
            ``command`` contains the keys as ``{lr}`` and ``{seed}``.
        sweep_file: a YAML or JSON file with the blocks grid and list; or with a search, which the call
            runs to its end.
        max_parallel: runs of the sweep at the same time, at most.
        only_new: submit no run of the sweep that has failed or was cancelled.
        options: ``name``, and options of the job, which are keys of the config's section ``job``: ``nodes``,
            ``gpus``, ``tasks_per_node``, ``launcher``, ``cpu``, ``executor``, ``time``, ``cpus_per_task``,
            ``mem``, ``partition``, ``account``, ``qos``, ``constraint``, ``reservation``,
            ``exclusive`` and ``exclude``. ``nodes`` is a number or a range (``"2-4"``), ``gpus`` are per node
            (``4``, ``"a100:4"``), and ``time`` is ``"HH:MM:SS"`` or minutes.

    Returns:
        The run, or the sweep.

    Raises:
        UserError: an argument or the config is wrong, a job has the run already, or the scheduler refuses;
            nothing has changed. The text has one line for each problem.
        TypeError: there is no such option.
        KeyboardInterrupt: Ctrl-C during the call; nothing has changed, or the text names the job that stays.
    """
    if callable(config):
        for option, value in (("task", task), ("command", command), ("sweep", sweep)):
            if value is not None:
                raise UserError(f"{option}=: is not for a function; omit it")
        command, config = add_on("function")(config, [arguments]), None
    elif arguments:
        raise TypeError("submit() takes one positional argument, except after a function")
    call = command if isinstance(command, FunctionCall) else None
    words = command.command if isinstance(command, FunctionCall) else command
    request = SubmitRequest(
        file=None if config is None else Path(config),
        overrides=_overrides(overrides, task, function=call is not None),
        options=_options(options),
        command=_words(words),
        command_place=PYTHON_COMMAND,
        profile=profile,
        runs=runs_folder(runs_dir),
        snapshot=snapshot,
        max_parallel=max_parallel,
        only_new=only_new,
        files=call.files if call else {},
        default_name=call.name if call else None,
    )
    if sweep is None and sweep_file is None:
        plan = plan_submission(request)
        carry_out(plan)
        return run_at(plan.run)
    submitted: Sweep = add_on("sweep")(request, sweep, sweep_file)
    return submitted


def _options(given: Mapping[str, object]) -> Layer:
    """Return the layer of the options with a key of the config; raises TypeError for another name."""
    for name in given.keys() - OPTIONS.keys():
        near = difflib.get_close_matches(name, OPTIONS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(f"submit() got an unexpected keyword argument {name!r}{hint}")
    return flag_layer(
        {OPTIONS[name]: (value, f"{name}=") for name, value in given.items() if value is not None}
    )


def _overrides(values: Mapping[str, object] | None, task: str | None, *, function: bool) -> Layer:
    """Return the layer of ``overrides=`` and ``task=``; ``task=`` takes precedence.

    ``function``: exit code 0 means that a function has returned, also after a stop signal.

    Raises:
        UserError: ``values`` has no dotted keys.
    """
    given: dict[str, tuple[object, str]] = {}
    if function:
        given["job.zero_after_signal"] = ("finished", f"{_PLACE}=")
    if values is not None and not isinstance(values, Mapping):
        raise UserError(f"{_PLACE}=: give a dict, such as {_PLACE}={{'train.lr': 3e-4}}")
    for key, value in (values or {}).items():
        require_key(key, f"{_PLACE}=")
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        given[key] = (plain, f"{_PLACE}=")
    if task is not None:
        given["task"] = (task, "task=")
    return flag_layer(given)


def _words(given: Sequence[str | os.PathLike[str]] | None) -> list[str]:
    """Return the command ``given`` as a list of text; raises UserError if it is one text."""
    if isinstance(given, str):
        raise UserError(f"command=: give a list of words: command={given.split()!r}")
    words = [str(word) for word in given or ()]
    if given is not None and not words:
        raise UserError("command=: has no words; name a program, or omit command=")
    return words
