"""Options of a submission from a command line."""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

from hpcrun.api.submission.choose_config import FLAGS, SubmitRequest
from hpcrun.cli.run_arguments import runs_dir
from hpcrun.config import override_layer
from hpcrun.errors import UserError
from hpcrun.tasks import BUILTIN

# Only if the schema expects a number; an account may be called 0123.
_COUNTS = ("nodes", "gpus", "tasks_per_node", "cpus_per_task")


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
    sweep.add_argument(
        "--sweep-file", type=Path, metavar="FILE", help="YAML: grid, zip, list, random, where"
    )
    sweep.add_argument(
        "--max-parallel", metavar="N", help="runs of the sweep at the same time, at most"
    )
    sweep.add_argument(
        "--pack", metavar="N", help="small runs of the sweep that share one job and its GPU"
    )


def request_of(arguments: argparse.Namespace) -> SubmitRequest:
    """Return the options of a command line.

    Raises:
        UserError: a word is no override.
        ConfigError: an override cannot be read.
    """
    _refuse_stray_files(arguments.overrides)
    return SubmitRequest(
        file=arguments.config,
        overrides=override_layer(arguments.overrides),
        flags=_flags(arguments),
        command=arguments.command,
        profile=getattr(arguments, "profile", None),
        runs=runs_dir(arguments) if "runs_dir" in arguments else None,
    )


def _refuse_stray_files(overrides: list[str]) -> None:
    for word in overrides:
        if "=" in word:
            continue
        if word in BUILTIN or re.fullmatch(r"[\w./-]+:\w+", word):
            raise UserError(f"{word}: a task is named with its key: task={word}")
        if word.endswith((".yaml", ".yml", ".json")):
            raise UserError(f"{word}: a config file is named with -c: -c {shlex.quote(word)}")
        if word.endswith((".py", ".sh")):
            raise UserError(f"{word}: a program to run comes after `--`: -- python {word}")


def _flags(arguments: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    given = {flag: getattr(arguments, flag, None) for flag in FLAGS}
    return {
        flag: (
            int(value) if flag in _COUNTS and _is_whole(value) else value,
            f"--{flag.replace('_', '-')}",
        )
        for flag, value in given.items()
        if value is not None
    }


def _is_whole(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.removeprefix("-").isdigit()
