"""The config of a submission: file, flags, overrides, and the task's own keys."""

import ast
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hpcrun.tasks
from hpcrun.config import (
    Config,
    ConfigError,
    Layer,
    Problem,
    check_name,
    file_layer,
    flag_layer,
    idle_lines,
    locate,
    profile_layer,
    profile_path,
    resolve,
    undecided,
    with_task_options,
)
from hpcrun.errors import UserError
from hpcrun.network.nccl.rules import PARTLY_KNOWN, concerns_nccl, settings_of
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.environment import sbatch_defaults
from hpcrun.tasks import BUILTIN, options_for

_QUICKSTART_TASK = "language-model"

FLAGS = {
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


@dataclass(frozen=True)
class SubmitRequest:
    """The options of a submission, from a command line or from Python.

    ``flags``: for each name of ``FLAGS`` the value and the option that gave it, such as ``--nodes``.
    ``command_place``: the same words for ``command``. ``profile``: a site profile, None for the default.
    ``runs``: the folder of the runs, None if the command concerns no run.
    """

    file: Path | None = None
    overrides: Layer = field(default_factory=Layer)
    flags: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    command: Sequence[str] = ()
    command_place: str = "after --"
    profile: str | None = None
    runs: Path | None = None


def choose_config(request: SubmitRequest, layers: Sequence[Layer] | None = None) -> Config:
    """Return the resolved config of ``request``, or of its ``layers``, with the task's options checked.

    Raises:
        ConfigError: with a line for each problem.
    """
    layers = config_layers(request) if layers is None else layers
    try:
        config = resolve(layers)
    except ConfigError as error:
        # A validation rule that is newer than a run must not prevent its resume.
        if error.meant is None or not _has_run(request, error.meant):
            raise
        config = error.meant
    for line in idle_lines(config, layers):
        say_aside(f"hpcrun: {line}")
    return with_task(config, layers)


def config_layers(request: SubmitRequest) -> list[Layer]:
    """Return the sources of the config, lowest precedence first: default name, profile, file, …, flags.

    Raises:
        ConfigError: a file or a value cannot be read.
    """
    command, file, overrides = [*request.command], request.file, request.overrides
    task, shown = overrides.values.get("task", _QUICKSTART_TASK), None
    # The quick start's steps and data fit its task only: another task begins with the plain defaults.
    if file is None and not command and task in (_QUICKSTART_TASK, BUILTIN[_QUICKSTART_TASK]):
        file, shown = quickstart(), "the quick start"
    layers = [] if file is None else [file_layer(file, shown)]
    profile = profile_path(os.environ, request.profile)
    if profile is not None:
        layers.insert(0, profile_layer(profile))
    elif line := undecided(os.environ, request.profile):
        say_aside(f"hpcrun: {line}")
    defaults = sbatch_defaults(os.environ)
    layers.insert(
        0,
        flag_layer(
            {f"job.{key}": (os.environ[name], f"${name}") for name, key in defaults.items()}
        ),
    )
    layers.insert(
        0, flag_layer({"name": _default_name(file, command, task, request.command_place)})
    )
    layers.append(overrides)
    layers.append(flag_layer({FLAGS[flag]: given for flag, given in request.flags.items()}))
    if command:
        layers.append(flag_layer({"command": (command, request.command_place)}))
    return layers


def with_task(config: Config, layers: Sequence[Layer]) -> Config:
    """Return ``config`` with the path of its task, and the task's own options checked.

    Raises:
        ConfigError: there is no such task, or an option of it is wrong.
    """
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


def _has_run(request: SubmitRequest, config: Config) -> bool:
    """Return True if a run of that name exists, with this config or another."""
    if config.name is None or request.runs is None:
        return False
    return RunDirectory(request.runs / config.name).exists()


def idle_on_this_machine(request: SubmitRequest) -> list[str]:
    """Return the options and keys of ``request`` that only Slurm uses, as the user wrote them."""
    given = [place for flag, (_, place) in request.flags.items() if FLAGS[flag] in _OF_SLURM]
    return given + [key for key in request.overrides.where if key in _OF_SLURM]


def quickstart() -> Path:
    """Return the config of the quick start: the user names neither a config nor another task."""
    # A package's data files are next to its code; importlib.resources would take a third of a dry run's time.
    return Path(hpcrun.tasks.__file__).with_name("quickstart.yaml")


def _default_name(
    file: Path | None, command: list[str], task: Any, command_place: str
) -> tuple[str, str]:
    if file is not None:
        return file.stem, str(file)
    if not command:
        try:
            return check_name(str(task).rpartition(":")[2].lstrip("_")), "command line"
        except ValueError:
            # The name is derived from the task, so the error is reported under "task".
            return "run", "command line"
    # `python train.py --lr 1` is named after the script, not after the interpreter.
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    return Path((scripts or command)[0]).stem, command_place


def task_path(task: str) -> str:
    """Return ``module:Class`` for a short name or a path.

    Modules are searched as a worker does: in the current folder, then along ``sys.path``.

    Raises:
        ValueError: there is no such task, module or class; the message suggests the nearest name.
    """
    if ":" not in task:
        if task in BUILTIN:
            return BUILTIN[task]
        near = difflib.get_close_matches(task, BUILTIN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(BUILTIN)}"
        raise ValueError(f"no built-in task is called {task}; {hint} (or write module:Class)")
    module, _, name = task.partition(":")
    source = _source(module)
    if source is not None:
        _require_name(source, module, name)
    return task


def _source(module: str) -> Path | None:
    """Return the module's file, or None if it is not Python source."""
    search: list[str] | None = [os.getcwd(), *sys.path]  # noqa: PTH109
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if spec is None:
            place = "." if depth == 0 else ".".join(parts[:depth])
            raise ValueError(
                f"there is no module {'.'.join(parts[: depth + 1])} in {place} or on PYTHONPATH; "
                "submit from the folder that contains it, or set PYTHONPATH"
            )
        search = list(spec.submodule_search_locations or [])
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _require_name(source: Path, module: str, name: str) -> None:
    try:
        tree = ast.parse(source.read_text(), filename=str(source))
    except SyntaxError as error:
        raise ValueError(
            f"{source}:{error.lineno}: {error.msg}; correct the module first"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: cannot be read: {error}") from error
    names = _defined(tree)
    if name not in names and "*" not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "name one of its classes"
        raise ValueError(f"{source} defines no {name} (module {module}); {hint}")


def _defined(tree: ast.Module) -> list[str]:
    """Return the names that the module may bind at its top level, including in branches."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found += [(alias.asname or alias.name).split(".")[0] for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    return found


def require_packages(config: Config) -> None:
    """Raise UserError if a package for ``watch`` is not installed.

    Nothing is checked if the ranks may have other packages than this process: in a container, with another
    Python, or with modules that ``job.setup`` loads.
    """
    job, watch = config.job, config.watch
    if config.command or job.container or job.python or job.setup:
        return
    wanted = {"tensorboard": watch.tensorboard, "wandb": watch.wandb is not None}
    for package, asked in wanted.items():
        found = find_spec(package) if asked else None
        # A folder of that name, as W&B creates in its working folder, is not a package.
        if asked and (found is None or found.origin is None):
            raise UserError(
                f"watch.{package}: the package {package} is not installed here; `pip install {package}`, or "
                "omit the key"
            )


def warn_of(env: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
    """Print one line for each error in ``job.env`` and in the submitting shell, and count the warnings.

    A shell's variables reach the job through sbatch; ``job.env`` replaces variables of the same name.
    """
    settings = [setting for setting in settings_of(environ, "shell") if _ours(setting.name)]
    settings += [setting for setting in settings_of(env, "job.env") if _ours(setting.name)]
    if not settings:
        return
    from hpcrun.network.nccl.lint import lint

    findings = [finding for finding in lint(settings) if finding.level != "note"]
    for finding in findings:
        if finding.level == "error":
            shown = finding.setting
            say_aside(f"hpcrun: {shown.where}: {shown.name}={shown.value}: {finding.message}")
    warnings = [finding.setting.name for finding in findings if finding.level == "warning"]
    if warnings:
        names = ", ".join(dict.fromkeys(warnings))
        say_aside(f"hpcrun: look at {names}: `hpcrun nccl lint` says why")


def _ours(name: str) -> bool:
    return concerns_nccl(name) or name.startswith(PARTLY_KNOWN)
