"""The variables that a shell script or a Python program sets, with the line of each."""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise

from hpcrun.network.nccl.lint import NcclFinding
from hpcrun.network.nccl.rules import Setting

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(
    r"environ(?:\.setdefault\(|\[)\s*(['\"])(?P<name>\w+)\1\s*(?:\]\s*=(?!=)|,)\s*(?P<rest>.+)"
)
_PYTHON_VALUE = re.compile(r"(?:str\()?\s*(?:(['\"])(.*?)\1|(\d+))\s*\)*\s*(?:#.*)?$")
_DEFAULTED = re.compile(r"\$\{\w+:?[-=]([^${}]*)\}")
_COMMANDS = frozenset({"export", "env", "declare", "typeset", "local", "-x", "exec", "ENV"})
_EXPORT_OPTION = re.compile(r"(?:^|\s)--export(?:=|\s+)(?P<list>\"[^\"]*\"|'[^']*'|\S+)")
_ENDS = frozenset({"then", "do", "else", "{"})
_SEPARATORS = ";&|()"

Words = list[tuple[str, str | None]]
"""Names with their values; None: the value is unknown, or there is none."""


def settings_of_script(text: str, name: str) -> list[Setting]:
    """Return the settings that a script makes, in the order of its lines.

    Recognized are ``export A=b``, ``A=b command``, ``env A=b``, a Dockerfile's ``ENV``, the lists of
    ``--export``, and assignments to Python's ``os.environ``. A value that contains a variable is unknown,
    except ``${A:-default}``, which counts as its default. Comments are ignored.

    Args:
        text: the script.
        name: the name of the script for the place of a setting.
    """
    found: list[Setting] = []
    for number, line in _lines(text):
        where = f"{name}:{number}"
        if match := _PYTHON.search(line):
            value = _PYTHON_VALUE.match(match["rest"].strip())
            known = value and (value[2] if value[1] else value[3])
            found.append(Setting(match["name"], known, where))
            continue
        found += [Setting(one, value, where) for one, value in _shell_settings(line)]
        exported = [pair for words in _export_lists(line) for pair in words]
        found += [Setting(one, value, where) for one, value in exported if value is not None]
    return found


def export_findings(text: str, name: str) -> list[NcclFinding]:
    """Return a finding for each ``--export=A=b,c``: Slurm cuts the value at its comma."""
    findings = []
    for number, line in _lines(text):
        for words in _export_lists(line):
            for (one, value), (rest, of_rest) in pairwise(words):
                # In capitals, the word is a variable to pass on (PATH), not the rest of a value (mlx5_1).
                if value is None or of_rest is not None or re.fullmatch(r"[A-Z_][A-Z0-9_]*", rest):
                    continue
                message = (
                    f"--export cuts the value at its comma: the job gets {value!r} and not {rest!r}; "
                    "write `export` lines in the script"
                )
                setting = Setting(one, value, f"{name}:{number}")
                findings.append(NcclFinding("error", setting, message, "srun"))
    return findings


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each logical line; a backslash at the end joins two lines."""
    joined, start = "", 0
    for number, raw in enumerate([*text.splitlines(), ""], start=1):
        start = start if joined else number
        if raw.endswith("\\"):
            joined += raw[:-1] + " "
            continue
        line, joined = joined + raw, ""
        if not line.lstrip().startswith("#") or line.lstrip().startswith("#SBATCH"):
            yield start, line


def _shell_settings(line: str) -> Words:
    """Return the assignments before each command of a line, or after ``export`` and ``env``."""
    found: Words = []
    assigning = True
    for word in _shell_words(line):
        match = _ASSIGNMENT.fullmatch(word)
        if word in _ENDS or word[0] in _SEPARATORS:
            assigning = True
        elif assigning and match:
            value = _DEFAULTED.sub(lambda default: default[1].strip("\"'"), match[2])
            found.append((match[1], None if "$" in value or "`" in value else value))
        elif word not in _COMMANDS:
            assigning = False
    return found


def _shell_words(line: str) -> Iterator[str]:
    """Yield the words of ``line`` without quotes; a quote that the line does not close ends it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace_split = True
    try:
        yield from filter(None, lexer)
    except ValueError:
        return


def _export_lists(line: str) -> list[Words]:
    """Return the words of each ``--export`` on the line, split like Slurm at every comma outside quotes."""
    lists = []
    for option in _EXPORT_OPTION.finditer(line):
        words: Words = []
        for word in option["list"].strip("\"'").split(","):
            name, separator, value = word.partition("=")
            words.append((name, (None if "$" in value else value) if separator else None))
        lists.append(words)
    return lists
