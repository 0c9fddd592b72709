"""The programs that a command line starts, as far as its words show it before it runs.

The words may lead through other programs: ``env A=1 bash -c 'exec torchrun train.py'``.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
_WRAPPERS = frozenset(
    {
        *(
            "chrt",
            "command",
            "env",
            "exec",
            "ionice",
            "nice",
            "nohup",
            "numactl",
            "setsid",
            "stdbuf",
        ),
        *("taskset", "time", "timeout"),
        *("conda", "hatch", "mamba", "micromamba", "pdm", "pipenv", "pixi", "poetry", "uv"),
        *("apptainer", "docker", "enroot", "podman", "shifter", "singularity"),
        *("nsys", "ncu", "rocprof", "srun"),
    }
)
# These programs change the folder or the files that the program sees.
_ELSEWHERE = frozenset({"apptainer", "docker", "enroot", "podman", "shifter", "singularity"})
_FOLDER_OPTIONS = ("-C", "-D", "--chdir", "--directory", "--cwd", "--project")
_LAUNCHERS = frozenset({"accelerate", "deepspeed", "torchrun"})
_PYTHON = re.compile(r"python(?:3(?:\.\d+)?)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_KEYWORDS = frozenset({"!", "{", "do", "elif", "else", "if", "then", "until", "while"})
_FLAGS = frozenset("bBdEiIOPqsSuvx")
_MOST_BYTES = 1 << 16
_DEEPEST = 4


@dataclass(frozen=True)
class Program:
    """A program and its arguments. ``direct``: it runs in the folder of the submission, not in a shell."""

    words: Sequence[str]
    direct: bool

    @property
    def name(self) -> str:
        """The program's name without its folder."""
        return Path(self.words[0]).name

    @property
    def is_python(self) -> bool:
        """Return True if it is an interpreter of Python."""
        return _PYTHON.fullmatch(self.name) is not None

    @property
    def is_shell(self) -> bool:
        """Return True if the program is a shell."""
        return self.name in _SHELLS


def programs(
    command: Sequence[str], folder: Path, direct: bool = True, depth: int = 0
) -> Iterator[Program]:
    """Yield each program that ``command`` starts, if it can be seen.

    Args:
        command: the words; before any shell.
        folder: the working folder, where the scripts of shells are read.
    """
    words = _without_assignments(command)
    while words and Path(words[0]).name in _WRAPPERS and depth < _DEEPEST:
        inner = _behind_wrapper(words[1:])
        before = words[: len(words) - len(inner)]
        direct = direct and not _leads_elsewhere(before)
        words, depth = inner, depth + 1
    if not words:
        return
    program = Program(words, direct)
    yield program
    if program.is_shell and depth < _DEEPEST:
        for line in _shell_commands(words[1:], folder):
            yield from programs(line, folder, False, depth + 1)


def python_module(words: Sequence[str]) -> str | None:
    """Return the module of ``python -m MODULE``; None if Python runs something else."""
    kind, value = _python_runs(words)
    return value if kind == "module" else None


def python_script(words: Sequence[str]) -> str | None:
    """Return the script of ``python SCRIPT``; None if Python runs something else."""
    kind, value = _python_runs(words)
    return value if kind == "script" else None


def shell_script(words: Sequence[str]) -> str | None:
    """Return the file of ``bash FILE``; None if the shell runs a text or its input."""
    kind, value = _shell_runs(words[1:])
    return value if kind == "file" else None


def _python_runs(words: Sequence[str]) -> tuple[str, str]:
    rest = iter(words[1:])
    for word in rest:
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(rest, None)
        elif word.startswith("--"):
            continue
        elif word.startswith("-") and len(word) > 1:
            letters = word[1:].lstrip("".join(_FLAGS))
            if letters.startswith("m"):
                return "module", letters[1:] or next(rest, "")
            if letters.startswith("c"):
                return "text", ""
        else:
            return ("input", "") if word == "-" else ("script", word)
    return "input", ""


def _shell_runs(arguments: Sequence[str]) -> tuple[str, str]:
    rest = iter(arguments)
    text = False
    for word in rest:
        if word in ("--rcfile", "--init-file"):
            next(rest, None)
        elif word.startswith("--"):
            continue
        elif word.startswith(("-", "+")) and len(word) > 1:
            text = text or "c" in word
            # `bash -euo pipefail`: the next word is the option's name.
            if word.endswith(("o", "O")):
                next(rest, None)
        else:
            return ("text" if text else "file"), word
    return "input", ""


def _without_assignments(words: Sequence[str]) -> Sequence[str]:
    first = next((at for at, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), None)
    return [] if first is None else words[first:]


# Options of uv, conda, mamba and pixi with a value that may look like a program.
_VALUED = frozenset(
    {
        *("-n", "--name", "-p", "--prefix", "--python", "--with", "--project", "--directory"),
        *("-e", "--environment", "--extra", "--group", "--env-file", "--cwd"),
    }
)


def _behind_wrapper(words: Sequence[str]) -> Sequence[str]:
    """Return the program after a wrapper's own options and their values."""
    value = False
    for at, word in enumerate(words):
        if value:
            value = False
            continue
        if word in ("-m", "--module"):
            return []
        value = word in _VALUED
        name = Path(word).name
        if name in _WRAPPERS | _SHELLS | _LAUNCHERS or _PYTHON.fullmatch(name):
            return words[at:]
        if word.endswith(".py"):
            # `uv run train.py`; an executable script is the same.
            return ["python", *words[at:]]
    return []


def _leads_elsewhere(words: Sequence[str]) -> bool:
    return any(Path(word).name in _ELSEWHERE or word.startswith(_FOLDER_OPTIONS) for word in words)


def _shell_commands(arguments: Sequence[str], folder: Path) -> Iterator[Sequence[str]]:
    kind, value = _shell_runs(arguments)
    text = value if kind == "text" else _read(folder / value) if kind == "file" else ""
    for line in text.replace("\\\n", " ").splitlines():
        yield from _simple_commands(line)


def _simple_commands(line: str) -> Iterator[Sequence[str]]:
    """Yield the words of each command in a line of a shell.

    None for a line that ends within quotes.
    """
    reader = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
    reader.whitespace_split = True
    words: list[str] = []
    try:
        for word in reader:
            if word.strip(";&|()"):
                if words or word not in _KEYWORDS:
                    words.append(word)
            elif words:
                yield words
                words = []
    except ValueError:
        return
    if words:
        yield words


def _read(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return ""
        return path.read_text(errors="replace")
    except OSError:
        return ""
