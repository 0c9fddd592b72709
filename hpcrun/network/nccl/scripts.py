"""The variables that a shell script or a Python program sets, with the line of each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpcrun.network.nccl.lint import NcclFinding
from hpcrun.network.nccl.rules import Setting

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(
    r"environ(?:\.setdefault\(|\[)\s*(['\"])(?P<name>\w+)\1\s*(?:\]\s*=(?!=)|,)\s*(?P<rest>.+)"
)
_DEFAULTED = re.compile(r"\$\{\w+:?[-=]([^${}]*)\}")
_COMMANDS = frozenset({"export", "env", "declare", "typeset", "local", "-x", "exec", "ENV"})
_EXPORT_OPTION = re.compile(r"(?:^|\s)--export(?:=|\s+)(?P<list>\"[^\"]*\"|'[^']*'|\S+)")
_ENDS = frozenset({";", "&&", "||", "|", "&", "then", "do", "else", "{", "("})


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
        match = _PYTHON.search(line)
        if match:
            found.append(Setting(match["name"], _python_value(match["rest"]), where))
            continue
        found += [Setting(one, value, where) for one, value in _shell_settings(line)]
        found += [
            Setting(one, value, where)
            for words in _export_lists(line)
            for one, value in words
            if value is not None
        ]
    return found


def export_findings(text: str, name: str) -> list[NcclFinding]:
    """Return a finding for each ``--export=A=b,c``: Slurm cuts the value at its comma."""
    findings = []
    for number, line in _lines(text):
        for words in _export_lists(line):
            findings += _cut(words, f"{name}:{number}")
    return findings


def _cut(words: list[tuple[str, str | None]], where: str) -> list[NcclFinding]:
    findings: list[NcclFinding] = []
    last: tuple[str, str] | None = None
    for word, value in words:
        if value is not None:
            last = (word, value)
        elif last is not None and word.upper() != "ALL" and not _is_variable_name(word):
            message = (
                f"--export cuts the value at its comma: the job gets {last[1]!r} and not {word!r}; "
                "write `export` lines in the script"
            )
            findings.append(NcclFinding("error", Setting(*last, where), message, "srun"))
            last = None
    return findings


def _is_variable_name(word: str) -> bool:
    """Return True if a word is a variable to pass on (``PATH``), not the rest of a value (``mlx5_1``)."""
    return re.fullmatch(r"[A-Z_][A-Z0-9_]*", word) is not None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each logical line; a backslash at the end joins two lines."""
    joined, start = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        start = start if joined else number
        if raw.endswith("\\"):
            joined += raw[:-1] + " "
            continue
        line, joined = joined + raw, ""
        if not line.lstrip().startswith("#") or line.lstrip().startswith("#SBATCH"):
            yield start, line
    if joined:
        yield start, joined


def _shell_settings(line: str) -> list[tuple[str, str | None]]:
    """Yield the assignments before each command of a line, or after ``export`` and ``env``."""
    found: list[tuple[str, str | None]] = []
    assigning = True
    for word in shell_words(line):
        match = _ASSIGNMENT.fullmatch(word.text)
        if word.text in _ENDS:
            assigning = True
        elif assigning and match:
            found.append((match[1], _shell_value(match[2], word.expands)))
        elif word.text not in _COMMANDS:
            assigning = False
    return found


def _shell_value(text: str, expands: bool) -> str | None:
    if not expands:
        return text
    text = _DEFAULTED.sub(lambda match: match[1].strip("\"'"), text)
    return None if "$" in text or "`" in text else text


def _python_value(rest: str) -> str | None:
    match = re.match(r"(?:str\()?\s*(?:(['\"])(.*?)\1|(\d+))\s*\)*\s*(?:#.*)?$", rest.strip())
    if match is None:
        return None
    return match[2] if match[1] else match[3]


def _export_lists(line: str) -> list[list[tuple[str, str | None]]]:
    """Yield the words of each ``--export`` on the line, split like Slurm at every comma outside quotes."""
    lists = []
    for option in _EXPORT_OPTION.finditer(line):
        words: list[tuple[str, str | None]] = []
        for word in option["list"].strip("\"'").split(","):
            name, separator, value = word.partition("=")
            words.append((name, (None if "$" in value else value) if separator else None))
        lists.append(words)
    return lists


_SEPARATORS = ";&|()"


@dataclass
class Word:
    """One word without its quotes. ``expands``: it contains a ``$`` or a backquote outside single quotes."""

    text: str = ""
    expands: bool = False
    begun: bool = False
    pieces: list[str] = field(default_factory=list)

    def add(self, character: str) -> None:
        """Append a character."""
        self.pieces.append(character)
        self.begun = True

    def finish(self) -> "Word":
        """Return the word with its text joined."""
        self.text = "".join(self.pieces)
        return self


def shell_words(line: str) -> Iterator[Word]:
    """Yield the words of ``line``, each of ``; & | ( )`` as a separate word, without a comment.

    A quote that the line does not close ends with the line. ``$(…)`` and backquotes stay one word.
    """
    word, position = Word(), 0
    while position < len(line):
        character = line[position]
        if character in "'\"":
            position = _quoted(line, position, word)
            continue
        if character == "\\" and position + 1 < len(line):
            word.add(line[position + 1])
            position += 2
            continue
        if character == "`" or line.startswith(("$(", "${"), position):
            position = _substitution(line, position, word)
            continue
        if character == "#" and not word.begun:
            break
        if character.isspace() or character in _SEPARATORS:
            if word.begun:
                yield word.finish()
                word = Word()
            if character in _SEPARATORS:
                yield Word(text=character)
        else:
            word.expands |= character == "$"
            word.add(character)
        position += 1
    if word.begun:
        yield word.finish()


def _quoted(line: str, start: int, word: Word) -> int:
    """Add the text in quotes to ``word``; return the position after the closing quote."""
    quote, position = line[start], start + 1
    word.begun = True
    while position < len(line) and line[position] != quote:
        if quote == '"' and line[position] == "\\" and position + 1 < len(line):
            position += 1
        elif quote == '"' and line.startswith(("$(", "${", "`"), position):
            position = _substitution(line, position, word)
            continue
        elif quote == '"' and line[position] == "$":
            word.expands = True
        word.add(line[position])
        position += 1
    return position + 1


def _substitution(line: str, start: int, word: Word) -> int:
    """Add ``$(…)``, ``${…}`` or a backquoted command whole; return the position after it."""
    word.expands = True
    if line[start] == "`":
        end = line.find("`", start + 1)
        end = len(line) if end < 0 else end + 1
    else:
        opening, closing = line[start + 1], ")" if line[start + 1] == "(" else "}"
        depth, end = 1, start + 2
        while end < len(line) and depth:
            depth += (line[end] == opening) - (line[end] == closing)
            end += 1
    for character in line[start:end]:
        word.add(character)
    return end
