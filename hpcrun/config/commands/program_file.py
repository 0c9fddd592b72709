"""The program and the script of a command: why Linux or Python could not start them, and the remedy."""

import difflib
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from hpcrun.errors import UserError

_OF_THE_SHELL = frozenset(
    {".", "alias", "cd", "export", "ml", "module", "set", "source", "ulimit", "umask"}
)
_READ = 4096


def require_runnable(command: Sequence[str], folder: Path) -> None:
    """Refuse a program that cannot be started, if this machine shows it.

    Args:
        command: the program and its arguments.
        folder: the working folder of the ranks.

    Raises:
        UserError: it is a command of the shell, several words in one, or a file that Linux cannot run.
    """
    name = command[0]
    file = folder / name
    if not _is_file(file):
        _refuse_words(command)
        return
    if "/" not in name and shutil.which(name):
        return
    starter = {".py": "python", ".sh": "bash", ".bash": "bash"}.get(file.suffix)
    if "/" not in name or not os.access(file, os.X_OK):
        path = name if "/" in name else f"./{name}"
        runs = f"chmod +x {path}, and write {path}"
        remedy = f"did you mean `{starter} {name}`?" if starter else runs
        raise UserError(f"{name}: cannot be run by itself; {remedy}")
    start = _start_of(file)
    first = start.partition(b"\n")[0]
    if first.startswith(b"#!") and first.endswith(b"\r"):
        raise UserError(f"{name}: {windows_lines(name)}")
    if start and not first.startswith(b"#!") and _is_text(start):
        raise UserError(
            f"{name}: has no first line such as #!/bin/bash, so Linux knows no interpreter for it; "
            f"did you mean `{starter or 'bash'} {name}`?"
        )


def _is_file(program: Path) -> bool:
    """Return True for a file; raises UserError if it, or the program to which it links, is out of reach."""
    try:
        return program.is_file()
    except PermissionError as error:
        try:
            # The Python of an environment may be in a home directory that is closed to other users.
            base = program.readlink()
            base = base if base.is_absolute() else (program.parent / base).readlink()
        except OSError:
            base = program
        where = "" if base == program else f", as a link to {base}"
        raise UserError(
            f"{program}: you have no permission to reach it{where}; ask its owner, or use a program or an "
            "environment of your own"
        ) from error


def _refuse_words(command: Sequence[str]) -> None:
    name = command[0]
    if shutil.which(name):
        return
    if name in _OF_THE_SHELL or list(command[:2]) == ["conda", "activate"]:
        line = " ".join(command)
        raise UserError(
            f"{name}: is a command of the shell, not a program; give it as a line of the set-up, and your "
            f"program after `--`: {shlex.quote(f'job.setup=[{line}]')}"
        )
    words = name.split()
    if len(words) > 1 and (shutil.which(words[0]) or "/" not in words[0]):
        raise UserError(
            f"{shlex.quote(name)}: the quotes make one name of the program and its arguments; remove "
            f"them: -- {name}"
        )


def windows_lines(name: str) -> str:
    """Return the cause and the remedy of a script with Windows line endings."""
    return (
        "has Windows line endings, so Linux reads a carriage return as a part of each line; remove them: "
        f"sed -i 's/\\r$//' {shlex.quote(name)}"
    )


def has_windows_lines(file: Path) -> bool:
    """Return True if the first lines of ``file`` end with a carriage return; False if it cannot be read."""
    try:
        return b"\r\n" in _start_of(file)
    except OSError:
        return False


def require_no_notebook(script: str) -> None:
    """Refuse a notebook in the place of a Python script.

    Raises:
        UserError: it is one; Python would read its JSON as an expression, and may even succeed.
    """
    if script.endswith(".ipynb"):
        name = shlex.quote(script)
        raise UserError(
            f"{script}: is a notebook, and Python runs scripts; convert it first: "
            f"jupyter nbconvert --to script {name}"
        )


def missing_script(script: str, command: Sequence[str], folder: Path) -> str:
    """Return the refusal of ``script`` of ``command``, which is not in ``folder``, with the nearest name."""
    text = f"{script}: no such file in {folder}"
    after = command[command.index(script) + 1 :]
    for count in range(1, min(len(after), 8) + 1):
        whole = " ".join([script, *after[:count]])
        if (folder / whole).is_file():
            return f"{text}; quote a path with a blank: {shlex.quote(whole)}"
    if script.startswith("~") or re.search(r"\$\w|\$\{", script):
        return f"{text}; no shell expands {script.partition('/')[0]} there: write it without quotes"
    place = (folder / script).parent
    try:
        known = [entry.name for entry in place.iterdir() if entry.is_file()]
    except OSError:
        known = []
    near = difflib.get_close_matches(Path(script).name, known, n=1)
    if near:
        return f"{text}; did you mean {Path(script).with_name(near[0])}?"
    return f"{text}; check the path after `--`"


def _start_of(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(_READ)


def _is_text(start: bytes) -> bool:
    return b"\0" not in start and all(byte > 31 or byte in b"\t\n\r\f" for byte in start)
