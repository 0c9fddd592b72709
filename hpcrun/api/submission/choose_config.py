"""The config of a submission: file, flags, overrides, and the task's own keys."""

import ast
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from hpcrun.api.places import runs_folder
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
    resolve,
    submit_options,
    tasks,
    with_task_options,
)
from hpcrun.config.tasks import BUILTIN, options_for
from hpcrun.errors import UserError
from hpcrun.folders import has_profile, has_site, shipped, shipped_example
from hpcrun.printing import say_aside

_QUICKSTART_TASK = "language-model"
_INTERPRETER = re.compile(
    r"(?:awk|gawk|guile|java|julia|lua|matlab|node|octave|perl|php|R|Rscript|ruby|tclsh|wolframscript)"
    r"[\d.]*|bash|dash|ksh|sh|zsh"
)
_SCRIPTS = frozenset(
    {".R", ".bash", ".jl", ".job", ".js", ".lua", ".m", ".pl", ".r", ".rb", ".sbatch", ".slurm"}
)
OF_NCCL = re.compile(r"[NR]CCL_|OFI_NCCL_|TORCH_|GLOO_|FI_")
"""Begin of every name that `hpcrun nccl lint` may look at; its rules are read only for such a name."""
PYTHON_COMMAND = "command="
"""The place of a command from Python."""

OPTIONS = {
    **{name: name for name in submit_options(Config)},
    **{name: f"job.{name}" for name in submit_options()},
}
"""The key of each option of a submission that has one."""
_SLURM_OPTIONS = {f"job.{name}" for name, (option, _) in submit_options().items() if option.sbatch}
_SLURM_KEYS = _SLURM_OPTIONS | {"job.gpu_type", "job.gpu_request", "job.sbatch_args"}


@dataclass(frozen=True)
class SubmitRequest:
    """What a user asks for, on a command line or from Python: a run, a resume or a sweep.

    ``options``: the values of `OPTIONS`; their places are the words that gave them, such as ``--nodes``.
    ``command_place``: the same words for ``command``. ``profile``: a site profile, None for the default.
    ``runs``: the folder of the runs. ``prepare``: make the run directory, and start nothing.
    ``snapshot``: keep a copy of the code; None: as before. ``max_parallel``: runs of a sweep at the same
    time. ``only_new``: leave the runs of a sweep that have failed or were cancelled. ``files``: new files of
    the run directory or the sweep folder. ``default_name``: the name without a given name; None: from file,
    command or task.
    """

    file: Path | None = None
    overrides: Layer = field(default_factory=Layer)
    options: Layer = field(default_factory=Layer)
    command: Sequence[str] = ()
    command_place: str = "after --"
    profile: str | None = None
    runs: Path = field(default_factory=runs_folder)
    prepare: bool = False
    snapshot: bool | None = True
    max_parallel: int | None = None
    only_new: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    default_name: str | None = None

    def place(self, option: str) -> str:
        """Return ``option`` as the user wrote it: ``--max-parallel``, or ``max_parallel=`` in Python."""
        from_python = self.command_place == PYTHON_COMMAND
        return f"{option}=" if from_python else f"--{option.replace('_', '-')}"


def choose_config(request: SubmitRequest, layers: Sequence[Layer] | None = None) -> Config:
    """Return the resolved config of ``request``, or of its ``layers``, with the task's options checked.

    Raises:
        ConfigError: with a line for each problem.
    """
    layers = config_layers(request) if layers is None else layers
    config = resolve(layers)
    for line in idle_lines(config, layers):
        say_aside(f"hpcrun: {line}")
    config = with_task(config, layers)
    check_site(config, layers)
    return config


def check_site(config: Config, layers: Sequence[Layer], executor: str | None = None) -> None:
    """Check ``config``, from ``layers``, against the rules of the site's file, if there is one.

    Args:
        executor: the executor that ``auto`` has chosen; None: rules about its values wait for the choice.

    Raises:
        ConfigError: with a line for each rule that the config breaks.
    """
    if has_site(os.environ):
        from hpcrun.config.site import read_site

        read_site(os.environ).check(config, layers, executor)


def config_layers(request: SubmitRequest) -> list[Layer]:
    """Return the sources of the config, lowest precedence first: default name, site, profile, file, …, flags.

    Raises:
        ConfigError: a file or a value cannot be read.
    """
    command, file, overrides = [*request.command], request.file, request.overrides
    task, shown = overrides.values.get("task", _QUICKSTART_TASK), None
    # The quick start's steps and data fit its task only: another task begins with the plain defaults.
    if file is None and not command and task in (_QUICKSTART_TASK, BUILTIN[_QUICKSTART_TASK]):
        file, shown = quickstart(), "the quick start"
    elif file is not None and file.parent == Path("configs") and not file.exists():
        # The documentation uses the configs of the checkout, which an installed package has too.
        file, shown = shipped(str(file)), str(file)
    return [
        flag_layer({"name": (request.default_name, request.command_place)})
        if request.default_name
        else flag_layer({"name": default_name(file, command, task, request.command_place)}),
        *_layers_of_the_site(request.profile),
        *([] if file is None else [file_layer(file, shown)]),
        overrides,
        request.options,
        *([flag_layer({"command": (command, request.command_place)})] if command else []),
    ]


def _layers_of_the_site(profile: str | None) -> list[Layer]:
    """Return what says where to run: the site's defaults, the variables of sbatch, and the profile."""
    layers = []
    if has_site(os.environ):
        from hpcrun.config.site import read_site

        layers.append(read_site(os.environ).defaults)
    if any(name.startswith("SBATCH_") for name in os.environ):
        from hpcrun.slurm.environment import sbatch_defaults

        given = sbatch_defaults(os.environ).items()
        layers.append(
            flag_layer({f"job.{key}": (os.environ[name], f"${name}") for name, key in given})
        )
    if profile is not None or has_profile(os.environ):
        from hpcrun.config.site import profile_layer, profile_path

        path = profile_path(os.environ, profile)
        layers += [] if path is None else [profile_layer(path)]
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


def say_idle(request: SubmitRequest, executor: str) -> None:
    """Print the options and keys of ``request`` that only Slurm uses, if the run starts on this machine."""
    given = [place for key, place in request.options.where.items() if key in _SLURM_OPTIONS]
    given += [key for key in request.overrides.where if key in _SLURM_KEYS]
    if given and executor in ("local", "debug"):
        say_aside(
            f"hpcrun: {', '.join(given)}: no effect on this machine (job.executor is {executor})"
        )


def quickstart() -> Path:
    """Return the config of the quick start: the user names neither a config nor another task."""
    # A package's data files are next to its code; importlib.resources would take a third of a dry run's time.
    return Path(tasks.__file__).with_name("quickstart.yaml")


def default_name(
    file: Path | None, command: list[str], task: object, command_place: str
) -> tuple[str, str]:
    if file is not None:
        return file.stem, str(file)
    if not command:
        try:
            return check_name(str(task).rpartition(":")[2].lstrip("_")), "command line"
        except ValueError:
            # The name is derived from the task, so the error is reported under "task".
            return "run", "command line"
    return Path(_named_after(command)).stem, command_place


def _named_after(command: Sequence[str]) -> str:
    """Return the script among the words of ``command``, as `python train.py --lr 1` has, or its program."""
    from hpcrun.config.commands.starters import without_wrappers

    # The text of `bash -c` is one word.
    words = [part for word in command for part in word.split()]
    if scripts := [word for word in words if word.endswith((".py", ".sh"))]:
        return scripts[0]
    program = next(iter(without_wrappers(command)), command[0])
    if not program.startswith("./") and (program.startswith("/") or not Path(program).is_file()):
        files = [word for word in words if word != program and Path(word).is_file()]
        interpreted = bool(_INTERPRETER.fullmatch(Path(program).name))
        scripts = [word for word in files if interpreted or Path(word).suffix in _SCRIPTS]
        return next(iter(scripts), program)
    return program


def task_path(task: str) -> str:
    """Return ``module:Class`` for a short name or a path.

    Modules are searched as a worker does: in the current folder, then along ``sys.path``.

    Raises:
        ValueError: there is no such task, module or class; the message suggests the nearest name.
    """
    if ":" not in task:
        if task in BUILTIN:
            return BUILTIN[task]
        from hpcrun.ports.entry_points import Port

        added = {one.name: one.value for one in Port("hpcrun.tasks", "task", BUILTIN).of_packages()}
        if task in added:
            return added[task]
        near = difflib.get_close_matches(task, [*BUILTIN, *added], n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join([*BUILTIN, *added])}"
        raise ValueError(f"no task is called {task}; {hint} (or write module:Class)")
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
            if (example := shipped_example(module)) is not None:
                return example
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
        text = source.read_text()
        ast.parse(text, filename=str(source))
    except SyntaxError as error:
        raise ValueError(
            f"{source}:{error.lineno}: {error.msg}; correct the module first"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: cannot be read: {error}") from error
    # The name may also be imported, or bound in a branch.
    names = re.findall(r"[^\W\d]\w*", text)
    if name not in names and "import *" not in text:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "name one of its classes"
        raise ValueError(f"{source} defines no {name} (module {module}); {hint}")


def require_key(key: object, place: str) -> None:
    """Raise UserError if ``key`` is no dotted key of the config."""
    if not isinstance(key, str) or not all(part.strip() for part in key.split(".")):
        raise UserError(f"{place}: {key!r} is not a key; write it as 'section.key'")


def require_packages(config: Config) -> None:
    """Raise UserError if a package for ``watch`` is not installed.

    Nothing is checked if the ranks may have other packages than this process: in a container, with another
    Python, or with modules that ``job.setup`` loads.
    """
    job, watch = config.job, config.watch
    if config.command or job.image or job.container or job.python or job.setup:
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


def warn_of(env: Mapping[str, str]) -> None:
    """Print a line if `hpcrun nccl lint` has an error or a warning for ``job.env`` or the submitting shell.

    A shell's variables reach the job through sbatch; ``job.env`` replaces variables of the same name.
    """
    given = {**os.environ, **env}
    if not any(map(OF_NCCL.match, given)):
        return
    from hpcrun.network.nccl.rules import PARTLY_KNOWN, concerns_nccl, settings_of

    settings = [
        one
        for one in settings_of(given, "job")
        if concerns_nccl(one.name) or one.name.startswith(PARTLY_KNOWN)
    ]
    if not settings:
        return
    from hpcrun.network.nccl.lint import lint

    found = [finding.setting.name for finding in lint(settings) if finding.level != "note"]
    if found:
        names = ", ".join(dict.fromkeys(found))
        say_aside(f"hpcrun: look at {names}: `hpcrun nccl lint` says why")
