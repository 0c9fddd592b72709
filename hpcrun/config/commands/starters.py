"""Find out which program a command starts: behind wrappers such as ``env``, and in the text of a shell."""

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHON = re.compile(r"python(?:3(?:\.\d+)?)?")
SHELLS = frozenset({"bash", "dash", "ksh", "sh", "zsh"})
LAUNCHERS = frozenset({"accelerate", "deepspeed", "torchrun"})
_SHELL_SCRIPT = re.compile(r"#!\s*(?:/\S*/)?(?:env\s+(?:-S\s*)?)?(?:ba|da|k|z)?sh\b")
# pip writes the second form if the path of the interpreter is long or has a blank.
_PYTHON_SCRIPT = re.compile(
    r"#![^\n]*?[/ ]python[\d.]*(?:[ \r\n]|$)|#!/bin/sh\n'''exec' \"?/[^\n]*/python[\d.]*\"? "
)
# Programs that start another program: the letters of their options with a value, and the number of words
# between the options and the program.
_WRAPPERS: Mapping[str, tuple[str, int]] = {
    **dict.fromkeys(("command", "nohup", "setsid", "unbuffer"), ("", 0)),
    **{"env": ("uCS", 0), "exec": ("a", 0), "ionice": ("cnp", 0), "nice": ("n", 0)},
    **{"numactl": ("CNilmpPw", 0), "stdbuf": ("ioe", 0), "taskset": ("", 1), "time": ("fo", 0)},
    **{"timeout": ("ks", 1)},
}
_KEYWORDS = frozenset({"!", "(", "do", "elif", "else", "if", "then", "until", "while", "{"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_MOST_BYTES = 1 << 16
_MODULES = r"(?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch|deepspeed)\b"
STEP_STARTERS = frozenset({"srun"})
JOB_STARTERS = frozenset({"salloc", "sbatch"})
MPI_STARTERS = frozenset(
    """
    aprun horovodrun ibrun jsrun mpiexec mpiexec.hydra mpirun mpirun_rsh orterun prterun prun
    """.split()  # noqa: SIM905
)
"""Programs of Slurm, of MPI and of other schedulers that start ranks, besides the launchers of PyTorch."""
_STARTS_RANKS = re.compile(
    r"(?:^|[\s/;&|('\"])(torchrun|deepspeed|accelerate launch)(?=\s|$)"
    rf"|-[a-zA-Z]*m ?({_MODULES})"
)
# A command with the name of a program that it does not run, such as `pip show deepspeed`.
_NAMES_ONLY = re.compile(r"(?:^|[\s/])(?:pip[\d.]*|install|which|command|type|echo|module)(?:\s|$)")
# The words after a script or a module are its own, such as `--strategy deepspeed`.
_SCRIPT = re.compile(rf"\S+\.(?:py|sh)\b|(?<=-m )(?!{_MODULES})\S+")


@dataclass(frozen=True)
class RankStarter:
    """A program of a command that starts ranks itself.

    Attributes:
        name: such as ``torchrun`` or ``srun``.
        options: the words before a script.
        words: the words of the program's own command.
        direct: True if the command begins with the program; False in a shell's text or behind other words.
    """

    name: str
    options: str
    words: Sequence[str]
    direct: bool


def rank_starter(command: Sequence[str], folder: Path) -> RankStarter | None:
    """Return the first program in ``command``, or in its shell script, that starts ranks."""
    return next(rank_starters(command, folder), None)


def rank_starters(command: Sequence[str], folder: Path) -> Iterator[RankStarter]:
    """Yield the programs in ``command``, or in its shell script, that start ranks."""
    text = shell_program(command, folder)
    if text is None:
        parts = [(shlex.join(command), command)]
    else:
        parts = [(part, _split(part)) for part in _commands(text)]
    for line, words in parts:
        own = without_wrappers(words)
        name = Path(own[0]).name if own else ""
        if name in STEP_STARTERS | JOB_STARTERS | MPI_STARTERS:
            yield RankStarter(name, line, own, direct=text is None)
            continue
        before = _SCRIPT.split(" ".join(words))[0]
        found = _STARTS_RANKS.search(before)
        if found and not _NAMES_ONLY.search(before[: found.start()]):
            name = found[1] or f"python -m {found[2]}"
            direct = text is None and _begins_with(own, name)
            yield RankStarter(name, before, own, direct)


def _begins_with(words: Sequence[str], name: str) -> bool:
    """Return True if ``words`` begin with the launcher ``name``, perhaps as a module of an interpreter."""
    module = name.removeprefix("python -m ")
    if module != name:
        return bool(PYTHON.fullmatch(Path(words[0]).name))
    return " ".join([Path(words[0]).name, *words[1:]]).startswith(name)


def _commands(text: str) -> Iterator[str]:
    """Yield the commands of a shell's text, without its comments; a quoted operator divides a command too."""
    for line in text.splitlines():
        yield from re.split(r"[;&|`]+|\$\(", re.split(r"(?:^|\s)#", line)[0])


def _split(part: str) -> Sequence[str]:
    try:
        words = shlex.split(part)
    except ValueError:  # a quote that another line or part closes
        words = part.split()
    return words


def shell_program(command: Sequence[str], folder: Path) -> str | None:
    """Return the text that a shell of ``command`` runs, from ``-c`` or a script; None without a shell."""
    words = without_wrappers(command)
    if not words:
        return None
    if Path(words[0]).name in SHELLS:
        text, word = shell_runs(words)
        found = word if text else read_script(folder / word)
    else:
        # The system runs such a file with the shell of its first line.
        found = read_script(folder / words[0]) if "/" in words[0] else ""
        if not _SHELL_SCRIPT.match(found):
            return None
    return found.replace("\\\n", " ")


def without_wrappers(command: Sequence[str]) -> Sequence[str]:
    """Return the words from the program on, without programs such as ``env`` that start another program."""
    at = 0
    while at < len(command):
        name = Path(command[at]).name
        if name in _WRAPPERS:
            valued, operands = _WRAPPERS[name]
            at += 1
            while at < len(command) and command[at].startswith("-"):
                at += 2 if len(command[at]) == 2 and command[at][1] in valued else 1
            at += operands
        elif _ASSIGNMENT.match(command[at]) or command[at] in _KEYWORDS:
            at += 1
        else:
            break
    return command[at:]


def shell_runs(words: Sequence[str]) -> tuple[bool, str]:
    """Return whether a shell runs a text (``-c``), and the text or file; empty if it reads its input."""
    rest, text = iter(words[1:]), False
    for word in rest:
        if not word.startswith(("-", "+")):
            return text, word
        text = text or ("c" in word and not word.startswith("--"))
        # `bash -euo pipefail`: the next word is the option's name.
        if word.endswith(("o", "O")):
            next(rest, None)
    return True, ""


def is_python_program(command: Sequence[str]) -> bool:
    """Return True if Python runs ``command`` itself: an interpreter, or a script that pip made for one.

    The launchers of ranks are other programs: their exit code stands for that of a rank.
    """
    if not command or Path(command[0]).name in LAUNCHERS | MPI_STARTERS:
        return False
    if PYTHON.fullmatch(Path(command[0]).name):
        return True
    file = shutil.which(command[0])
    return file is not None and bool(_PYTHON_SCRIPT.match(read_script(Path(file))))


def read_script(path: Path) -> str:
    """Return the text of a script; empty if the file is missing, is no text, or is too large."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return ""
        text = path.read_bytes()
        return "" if b"\0" in text else text.decode(errors="replace")
    except OSError:
        return ""
