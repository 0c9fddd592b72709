"""Checks of the command after ``--``, before anything is created or submitted."""

import re
from collections.abc import Sequence
from pathlib import Path

from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.printing import say_aside

_INTERPRETER = re.compile(r"python(3(\.\d+)?)?|(ba|da|k|z)?sh")
_LAUNCHERS = ("accelerate", "deepspeed", "torchrun")
# The options of an interpreter for a module or a text.
_NO_SCRIPT = re.compile(r"-\w*[cm]")


def check_command(config: Config, folder: Path) -> None:
    """Check the command of ``config``, if any, and warn if it would start several separate trainings.

    Args:
        folder: the ranks' working folder.

    Raises:
        UserError: its script does not exist, or the launcher cannot start it.
    """
    job = config.job
    if not config.command:
        return
    from hpcrun.command.rank_starters import require_script, separate_trainings

    if job.launcher is not None:
        require_script(job.launcher, config.command, folder)
    # The files of a container are unknown here.
    if not job.container:
        require_there(
            config.command,
            folder,
            launched=job.launcher is not None,
            here=job.executor in ("local", "debug"),
            prepared_by=[*job.setup, *job.node_setup],
        )
    line = None
    if job.launcher is None:
        line = separate_trainings(config.command, folder, nodes=job.nodes, tasks=job.tasks_on_node)
    if line is not None:
        say_aside(f"hpcrun: {line}")


def require_there(
    command: Sequence[str],
    folder: Path,
    *,
    launched: bool,
    here: bool,
    prepared_by: Sequence[str],
) -> None:
    """Check that the script of ``command`` exists, if this can be known before the job runs.

    A relative path can be checked: the ranks work in ``folder`` too. An absolute path may be on nodes only.

    Args:
        launched: a launcher starts the command, which begins with the script or the launcher's options.
        here: the job runs on this machine.
        prepared_by: the lines of the set-up, which may create the script.

    Raises:
        UserError: the script does not exist.
    """
    script = _launched(command) if launched else _named(command)
    if script is None:
        return
    path = folder / script
    known = here or not Path(script).is_absolute() or path.is_relative_to(folder)
    first = next((part for part in Path(script).parts if part not in ("/", ".", "..")), "")
    made = any(first in line for line in prepared_by)
    if known and not made and "$" not in script and not path.exists():
        raise UserError(f"{script}: no such file in {folder}; check the path after `--`")


def _launched(words: Sequence[str]) -> str | None:
    if "-m" in words or "--module" in words:
        return None
    return next((word for word in words if word.endswith(".py")), None)


def _named(command: Sequence[str]) -> str | None:
    """Return the script that the program of ``command`` runs; None if its words do not show it."""
    program, *words = command
    name = Path(program).name
    if name in _LAUNCHERS:
        return _launched(words)
    if _INTERPRETER.fullmatch(name):
        at = next((at for at, word in enumerate(words) if word[:1] not in "-+"), len(words))
        script = next(iter(words[at:]), "")
        text = any(_NO_SCRIPT.fullmatch(option) for option in words[:at])
        return script if script.endswith((".py", ".sh")) and not text else None
    return program if "/" in program else None
