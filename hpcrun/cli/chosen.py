"""The config that a command line means: file, flags, overrides, and the task's own keys."""

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import Any

import hpcrun.tasks
from hpcrun.cli.runs import runs_dir
from hpcrun.cluster.environment import sbatch_defaults
from hpcrun.config import (
    Config,
    ConfigError,
    Problem,
    check_name,
    file_layer,
    flag_layer,
    idle_lines,
    locate,
    override_layer,
    profile_layer,
    profile_path,
    resolve,
    undecided,
    with_task_options,
)
from hpcrun.errors import UserError
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.tasks import BUILTIN, options_for
from hpcrun.tasks.finding import task_path

_QUICKSTART_TASK = "language-model"

_FLAGS = {
    "nodes": "job.nodes",
    "gpus": "job.gpus",
    "tasks_per_node": "job.tasks_per_node",
    "launcher": "job.launcher",
    "cpu": "job.cpu",
    "time": "job.time",
    "cluster": "job.cluster",
    "partition": "job.partition",
    "account": "job.account",
    "qos": "job.qos",
    "constraint": "job.constraint",
    "reservation": "job.reservation",
    "exclusive": "job.exclusive",
    "exclude": "job.exclude",
    "mem": "job.mem",
    "cpus_per_task": "job.cpus_per_task",
    "executor": "job.executor",
    "name": "name",
}
_OF_SLURM = frozenset(
    f"job.{name}"
    for name in (
        *("cluster", "partition", "account", "qos", "constraint", "reservation", "exclusive"),
        *("exclude", "mem", "gpu_type", "gpu_request", "sbatch_args"),
    )
)
# Where the schema wants a number; an account may be called 0123.
_COUNTS = ("nodes", "gpus", "tasks_per_node", "cpus_per_task")


def choose_config(arguments: argparse.Namespace) -> Config:
    """The resolved config, its task found and its task's options checked, without importing torch.

    Raises:
        ConfigError: a line for each thing that is wrong.
    """
    command: list[str] = arguments.command
    file: Path | None = arguments.config
    _refuse_stray_files(arguments.overrides)
    overrides = override_layer(arguments.overrides)
    task = overrides.values.get("task", _QUICKSTART_TASK)
    # Its steps and data are chosen for its task: any other one begins with the plain defaults.
    if file is None and not command and task in (_QUICKSTART_TASK, BUILTIN[_QUICKSTART_TASK]):
        file = quickstart()
    layers = [] if file is None else [file_layer(file)]
    wanted: str | None = getattr(arguments, "profile", None)
    profile = profile_path(os.environ, wanted)
    if profile is not None:
        layers.insert(0, profile_layer(profile))
    elif line := undecided(os.environ, wanted):
        say_aside(f"hpcrun: {line}")
    defaults = sbatch_defaults(os.environ)
    layers.insert(
        0,
        flag_layer(
            {f"job.{key}": (os.environ[name], f"${name}") for name, key in defaults.items()}
        ),
    )
    layers.insert(0, flag_layer({"name": _default_name(file, command, task)}))
    layers.append(overrides)
    layers.append(flag_layer(_flags(arguments)))
    if command:
        layers.append(flag_layer({"command": (command, "after --")}))
    try:
        config = resolve(layers)
    except ConfigError as error:
        # A refusal that is younger than a run is to keep nobody from continuing it.
        if error.meant is None or not _has_run(arguments, error.meant):
            raise
        config = error.meant
    for line in idle_lines(config, layers):
        say_aside(f"hpcrun: {line}")
    if config.command:
        return config
    where = locate(layers)
    options = options_for(config.task)
    if options is not None:
        config = with_task_options(config, options, where)
    try:
        path = task_path(config.task)
    except ValueError as error:
        raise ConfigError([Problem(where("task"), "task", str(error))]) from error
    return config.model_copy(update={"task": path})


def _has_run(arguments: argparse.Namespace, config: Config) -> bool:
    """Whether a run of that name is there; whether it is one of that config is not asked."""
    if config.name is None or "runs_dir" not in arguments:
        return False
    return RunDirectory(runs_dir(arguments) / config.name).exists()


def _refuse_stray_files(overrides: list[str]) -> None:
    for word in overrides:
        if "=" in word:
            continue
        if word in BUILTIN or re.fullmatch(r"[\w./-]+:\w+", word):
            raise UserError(f"{word}: a task is named with its key: task={word}")
        if word.endswith((".yaml", ".yml", ".json")):
            raise UserError(f"{word}: a config file is named with -c: -c {shlex.quote(word)}")
        if word.endswith((".py", ".sh")):
            raise UserError(f"{word}: a program to run stands after `--`: -- python {word}")


def idle_on_this_machine(arguments: argparse.Namespace) -> list[str]:
    """Return the options of the command line that only Slurm understands."""
    flags = [flag for flag, key in _FLAGS.items() if key in _OF_SLURM]
    given = [
        f"--{flag.replace('_', '-')}"
        for flag in flags
        if getattr(arguments, flag, None) is not None
    ]
    keys = [word.partition("=")[0] for word in getattr(arguments, "overrides", ())]
    return given + [key for key in keys if key in _OF_SLURM]


def quickstart() -> Path:
    """The config that is used when neither one nor another task is named."""
    # importlib.resources would cost a third of a dry run; a package's data are files beside its code.
    return Path(hpcrun.tasks.__file__).with_name("quickstart.yaml")


def _default_name(file: Path | None, command: list[str], task: Any) -> tuple[str, str]:
    if file is not None:
        return file.stem, str(file)
    if not command:
        try:
            return check_name(str(task).rpartition(":")[2].lstrip("_")), "command line"
        except ValueError:
            # Nobody gave it; what is wrong with the task is said of the task.
            return "run", "command line"
    # `python train.py --lr 1`: the script, not the interpreter, is what a person would call it.
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    return Path((scripts or command)[0]).stem, "after --"


def _flags(arguments: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    given = {flag: getattr(arguments, flag, None) for flag in _FLAGS}
    return {
        _FLAGS[flag]: (
            int(value) if flag in _COUNTS and _is_whole(value) else value,
            f"--{flag.replace('_', '-')}",
        )
        for flag, value in given.items()
        if value is not None
    }


def _is_whole(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit()
