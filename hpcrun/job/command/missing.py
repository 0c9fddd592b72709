"""Refuse a missing script after ``--`` before the job waits in the queue."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.job.command.visible import Program, programs, python_script, shell_script


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
    if not launched:
        _require_program(command[0], folder)
    for script in _launched(command) if launched else _named(command, folder):
        path = folder / script
        known = here or not Path(script).is_absolute() or path.is_relative_to(folder)
        first = next((part for part in Path(script).parts if part not in ("/", ".", "..")), "")
        made = any(first in line for line in prepared_by)
        if known and not made and "$" not in script and not path.exists():
            raise UserError(f"{script}: no such file in {folder}; check the path after `--`")


def _require_program(name: str, folder: Path) -> None:
    """Refuse a file of ``folder`` that is given as the program, but cannot be run."""
    file = folder / name
    if not file.is_file() or ("/" not in name and shutil.which(name)) or _runs(name, file):
        return
    starter = {".py": "python", ".sh": "bash"}.get(file.suffix)
    remedy = f"did you mean `{starter} {name}`?" if starter else f"make it executable: ./{name}"
    raise UserError(f"{name}: cannot be run by itself; {remedy}")


def _runs(name: str, file: Path) -> bool:
    return "/" in name and os.access(file, os.X_OK)


def _launched(command: Sequence[str]) -> list[str]:
    if "-m" in command or "--module" in command:
        return []
    return [word for word in command if word.endswith(".py")][:1]


def _named(command: Sequence[str], folder: Path) -> list[str]:
    """Return the script that the first program of ``command`` runs, if it can be seen."""
    program = next(programs(command, folder), None)
    if program is None or not program.direct:
        return []
    script = _script(program)
    return [] if script is None else [script]


def _script(program: Program) -> str | None:
    words = program.words
    if program.is_python:
        return python_script(words)
    if program.is_shell:
        return shell_script(words)
    if program.name in ("torchrun", "deepspeed", "accelerate"):
        return next((word for word in words[1:] if word.endswith(".py")), None)
    return words[0] if "/" in words[0] else None
