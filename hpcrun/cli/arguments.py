"""Arguments that several commands share."""

import argparse
import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrun.api.places import home_path, runs_folder
from hpcrun.api.submission.choose_config import OPTIONS, SubmitRequest
from hpcrun.config import override_layer, submit_options
from hpcrun.config.config import merge
from hpcrun.config.fields import Section
from hpcrun.config.tasks import BUILTIN
from hpcrun.errors import UserError
from hpcrun.run.directory import RunDirectory, RunError, find

if TYPE_CHECKING:
    from hpcrun.storage.store import CheckpointStore


def add_runs_dir(parser: argparse._ActionsContainer) -> None:
    """Add ``--runs-dir``, the folder of the run directories."""
    parser.add_argument(
        "--runs-dir",
        type=Path,
        metavar="DIR",
        help="folder of the run directories (default: $HPCRUN_RUNS, else ./runs)",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN and ``--runs-dir``."""
    parser.add_argument("run", metavar="RUN", help="a run's name, or its directory")
    add_runs_dir(parser)


def runs_dir(arguments: argparse.Namespace) -> Path:
    """Return the folder that contains the runs: ``--runs-dir``, else the default."""
    return runs_folder(arguments.runs_dir)


def find_run(arguments: argparse.Namespace) -> RunDirectory:
    """Return the run that RUN names; raises RunError if there is none."""
    return find_named(arguments.run, runs_dir(arguments))


def find_named(name: str, folder: Path) -> RunDirectory:
    """Return the run ``name`` of ``folder``.

    Raises:
        RunError: there is no such run; the text names this user's jobs of this name in Slurm.
    """
    try:
        return find(name, folder)
    except RunError as error:
        jobs = _jobs_named(name) if str(error).startswith(f"{name}: no such run") else []
        if not jobs:
            raise
        raise RunError(
            f"{error}; Slurm has your job {', '.join(jobs)} of this name: give the folder of its run with "
            f"--runs-dir, or, if that was deleted, end it with `scancel {' '.join(jobs)}`"
        ) from error


def _jobs_named(name: str) -> list[str]:
    # A comma would separate names, and a path is no job's name.
    if not re.fullmatch(r"[\w.+=-]+(/\d+)?", name):
        return []
    from hpcrun import slurm
    from hpcrun.slurm.launch.slurm_jobs import PATIENCE

    listed = slurm.run(slurm.squeue_named_command(name.replace("/", "-")), timeout=PATIENCE)
    return list(dict.fromkeys(listed.stdout.split())) if listed.returncode == 0 else []


def find_run_instead(target: str, folder: Path, missing: str) -> RunDirectory:
    """Return the run ``target`` of a command that also takes files.

    Raises:
        RunError: there is no such run; ``missing`` describes the other possibility, such as "no such file".
    """
    try:
        return find(target, folder)
    except RunError as error:
        start, reported = f"{target}: no such run", str(error)
        if not reported.startswith(start):
            raise
        rest = reported.removeprefix(start)
        raise RunError(f"{target}: {missing}, and no such run{rest}") from error


def add_saved(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN, which may be a folder of checkpoints, and ``--runs-dir``."""
    parser.add_argument(
        "run", metavar="RUN", help="a run's name, its directory, or a Checkpointer's folder"
    )
    add_runs_dir(parser)


def find_saved(arguments: argparse.Namespace, owner: str) -> "tuple[CheckpointStore, str]":
    """Return the checkpoints that RUN names, and the name of their run or folder.

    Args:
        owner: the owner string for the store.

    Raises:
        RunError: there is neither a run nor a checkpoint.
        CheckpointError: other users may write there.
    """
    from hpcrun.storage.store import CheckpointStore

    folder = Path(arguments.run).absolute()
    is_run = any(
        RunDirectory(path).exists() for path in (runs_dir(arguments) / arguments.run, folder)
    )
    if not is_run and folder.is_dir():
        store = CheckpointStore(folder, owner)
        if store.steps():
            store.require_private()
            return store, arguments.run
    run = find_run(arguments)
    store = CheckpointStore(run.checkpoints, owner)
    store.require_private()
    return store, run.name


def require_subcommand(command: str, word: str | None, known: Sequence[str], kind: str) -> str:
    """Return ``word`` if it is one of ``known``.

    Args:
        kind: the noun for the second word, such as ``view``.

    Raises:
        UserError: the word is missing or unknown; the text names the nearest word, or all of them.
    """
    if word in known:
        return str(word)
    near = difflib.get_close_matches(word or "", known, n=1)
    all_of_them = " or ".join(f"`{command} {name}`" for name in known)
    hint = f"did you mean {near[0]}?" if near else f"write {all_of_them}"
    raise UserError(
        f"{command} {word}: there is no such {kind}; {hint}" if word else f"{command}: {hint}"
    )


def add_options(parser: argparse._ActionsContainer, model: type[Section]) -> None:
    """Add the options of a submission that are keys of ``model``: ``Job``, or the whole config."""
    for name, (option, description) in submit_options(model).items():
        switch: dict[str, Any] = {"action": "store_true", "default": None}
        text = description.rstrip(".").replace("null: ", "default: ")
        # CPU, GPUs and Slurm keep their capitals.
        if text[1].islower() and not text.startswith("Slurm"):
            text = text[0].lower() + text[1:]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            help=text,
            **({"metavar": option.value} if option.value else switch),
        )


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the options of a sweep: many runs of one config, or of one command with {lr} in it."""
    sweep = parser.add_argument_group("sweeps: many runs")
    sweep.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="one run per value: train.lr=1e-4,3e-4 or seed=0:5 (0 to 4); several: all combinations",
    )
    sweep.add_argument("--sweep-file", type=Path, metavar="FILE", help="YAML: grid, list, search")
    sweep.add_argument(
        "--max-parallel", type=int, metavar="N", help="runs at the same time, at most (search: 1)"
    )
    sweep.add_argument(
        "--only-new", action="store_true", help="submit no run that has failed or was cancelled"
    )


def request_of(arguments: argparse.Namespace) -> SubmitRequest:
    """Return the options of a command line.

    Raises:
        UserError: a word is no override.
        ConfigError: an override or an option cannot be read.
    """
    given = vars(arguments)
    overrides = given.get("overrides", [])
    _refuse_stray_files(overrides)
    no_snapshot = given.get("no_snapshot")
    return SubmitRequest(
        file=home_path(file) if (file := given.get("config")) else None,
        overrides=override_layer(overrides),
        options=merge(
            override_layer([f"{key}={value}"], f"--{name.replace('_', '-')}")
            for name, key in OPTIONS.items()
            if (value := given.get(name)) is not None
        ),
        command=arguments.command,
        profile=given.get("profile"),
        runs=runs_folder(given.get("runs_dir")),
        prepare=given.get("prepare", False),
        snapshot=None if no_snapshot is None else not no_snapshot,
        max_parallel=given.get("max_parallel"),
        only_new=given.get("only_new", False),
    )


def _refuse_stray_files(overrides: list[str]) -> None:
    for word in overrides:
        if "=" in word:
            continue
        if word in BUILTIN or re.fullmatch(r"[\w./-]+:\w+", word):
            raise UserError(f"{word}: a task is named with its key: task={word}")
        if word.endswith((".yaml", ".yml", ".json")):
            raise UserError(f"{word}: a config file is named with -c: -c {shlex.quote(word)}")
        if (
            word.endswith((".py", ".sh", ".bash", ".sbatch", ".slurm", ".ipynb"))
            or Path(word).is_file()
        ):
            from hpcrun.api.submission.requests import how_to_submit

            raise UserError(f"{word}: {how_to_submit(Path(word))}")


_MAX = 64


def add_local(parser: argparse._ActionsContainer, text: str) -> None:
    """Add ``--local`` with the help ``text``."""
    parser.add_argument("--local", type=int, metavar="N", help=text)


def require_local(local: int | None, least: int) -> None:
    """Raise UserError if ``--local`` is given and not between ``least`` and 64."""
    if local is not None and not least <= local <= _MAX:
        raise UserError(f"--local {local}: should be {least} to {_MAX}")


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="a metric, or result.KEY of result.json (default: validation_loss, else loss)",
    )
    parser.add_argument(
        "--goal",
        choices=("min", "max"),
        help="whether lower or higher is better (default: by the metric's name)",
    )
    parser.add_argument(
        "--at", default="last", metavar="WHEN", help="last, best, or a step (default: last)"
    )
    parser.add_argument(
        "--by",
        metavar="KEYS",
        help="group by these keys of the config, such as train.lr,model.width",
    )
    parser.add_argument(
        "--seed-key", default="seed", metavar="KEY", help="the config key that holds the seed"
    )


def require_moment(at: str) -> None:
    """Raise UserError if ``--at`` is no moment of a run."""
    if at not in ("last", "best") and not at.isdigit():
        raise UserError(f"--at {at}: should be last, best or a step")


def keys(by: str | None) -> list[str] | None:
    """Return the keys of ``--by``; None if it is not given."""
    return by.split(",") if by else None
