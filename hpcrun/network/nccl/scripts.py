"""Read the variables that a shell script sets: by export, for one command, or in options of a launcher."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpcrun.network.nccl.rules import Setting, is_of_network

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({_NAME})=(.*)", re.DOTALL)
# -x A=b (Open MPI), -e A=b (docker), --env=A=b, -genv=A=b: an option that is written together with its value.
_OPTION = re.compile(rf"(?:--?[A-Za-z][\w-]*=|-[exv])({_NAME})=(.*)", re.DOTALL)
_ASSIGNMENT_IN_TEXT = re.compile(rf"^\s*(?:export\s+)?({_NAME})=(\S*)", re.MULTILINE)
_CONTAINER = re.compile(r"(?:SINGULARITYENV|APPTAINERENV)_(?=\w)")
_DEFAULTED = re.compile(r"\$\{\w+:?[-=]([^${}]*)\}")
_EXPORT_OPTION = re.compile(r"(?:^|\s)--export(?:=|\s+)(?P<list>\"[^\"]*\"|'[^']*'|\S+)")
_CALL = re.compile(
    rf"(?:setenv|pushenv|putenv|setdefault)\(\s*(['\"])({_NAME})\1\s*,\s*(['\"])(.*?)\3"
)
_PYTHON = re.compile(
    r"(?:environ(?:\.setdefault\(|\[)|\bENV\[)\s*(['\"])(?P<name>\w+)\1\s*(?:\]\s*=(?!=)|,)\s*(?P<rest>.+)"
)
_PYTHON_VALUE = re.compile(r"(?:str\()?\s*(?:(['\"])(.*?)\1|(\d+))\s*\)*\s*(?:#.*)?$")
_JSON = re.compile(rf"\"({_NAME})\"\s*:\s*\"([^\"]*)\"")
# "NCCL_IB_TIMEOUT set by environment to 50." is a line of NCCL's log.
_LOG = re.compile(rf"\bNCCL INFO\b.*?\b({_NAME}) set (?:by environment )?to (.*)")
_LOG_LINE, _LINES_OF_A_LOG = re.compile(r"^\S+:\d+:\d+ \[\d+\] NCCL INFO", re.MULTILINE), 20
_LOG_INVALID = re.compile(rf"\bNCCL INFO\b.*?\bInvalid value (.*?) for ({_NAME}), using default")
_EXPORTING = frozenset({"export", "declare", "typeset", "readonly", "local"})
_BEFORE = frozenset({"env", "exec", "-x", "nohup", "time", "command", "sudo"})
_TWO_WORDS = frozenset({"setenv", "pushenv"})
_INTEL = frozenset({"-genv", "-env", "--genv", "--env"})
_SILENT = frozenset(
    {"echo", "printf", "grep", "egrep", "sed", "awk", "test", "[", "[[", "unset", "cat"}
)
_ENDS = frozenset({"if", "elif", "while", "until", "then", "do", "else", "{", "!"})
_SEPARATORS = ";&|()"
_DIRECTIVE = re.compile(r"\s*#(SBATCH|PBS|BSUB|\$)\s")
# Characters of a line, and of scripts in scripts.
_LONGEST, _DEEP = 1 << 14, 3


@dataclass
class Script:
    """The content of a script.

    ``settings``: in the order of the lines. ``broken``: settings in a line that does something else, with the
    reason. ``plain``: assignments without an export. ``exported``: names that are exported without a value.
    ``env_files``: files that a container reads, each with its place.
    """

    settings: list[Setting] = field(default_factory=list)
    broken: list[tuple[Setting, str]] = field(default_factory=list)
    plain: list[Setting] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    env_files: list[tuple[str, str]] = field(default_factory=list)
    exports_all: bool = False
    commands: int = 0


def read_script(text: str, name: str) -> Script:
    """Return the settings of a shell script, a Dockerfile, a modulefile, lines ``A=b`` or a log of NCCL.

    A value that contains a variable is unknown, except ``${A:-default}``, which counts as its default.
    Comments are ignored.

    Args:
        text: the script.
        name: the name of the script for the place of a setting.
    """
    script = Script()
    is_log = len(_LOG_LINE.findall(text)) >= _LINES_OF_A_LOG
    seen: set[tuple[str, str | None]] = set()
    for place, line in lines_of(text):
        where = f"{name}:{place}"
        logged = _logged(line, where)
        if logged:
            # Each rank logs the same line.
            script.settings += [one for one in logged if (one.name, one.value) not in seen]
            seen.update((one.name, one.value) for one in logged)
        elif is_log or len(line) > _LONGEST:
            continue
        elif calls := _calls(line, where):
            script.settings += calls
        else:
            _Line(script, where).read(_DIRECTIVE.sub(r"\1 ", line, count=1))
            script.settings += _of_export_lists(line, where)
    return script


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each logical line; a backslash at the end joins two lines."""
    joined, start = "", 0
    for place, raw in enumerate([*text.splitlines(), ""], start=1):
        start = start if joined else place
        if raw.endswith("\\"):
            joined += raw[:-1] + " "
            continue
        line, joined = joined + raw, ""
        if not line.lstrip().startswith("#") or _DIRECTIVE.match(line):
            yield start, line


def export_lists(line: str) -> list[list[tuple[str, str | None]]]:
    """Return the words of each ``--export`` on the line, split like Slurm at every comma outside quotes.

    Each word is a name with its value. None: the value is unknown, or there is none.
    """
    lists = []
    for option in _EXPORT_OPTION.finditer(line):
        words = []
        for word in option["list"].strip("\"'").split(","):
            name, separator, value = word.partition("=")
            words.append((name, (None if "$" in value else value) if separator else None))
        lists.append(words)
    return lists


def _of_export_lists(line: str, where: str) -> list[Setting]:
    pairs = [pair for words in export_lists(line) for pair in words]
    return [Setting(name, value, where) for name, value in pairs if value is not None]


def _logged(line: str, where: str) -> list[Setting]:
    if match := _LOG.search(line):
        return [Setting(match[1], match[2].strip().removesuffix("."), where, of_command=True)]
    if match := _LOG_INVALID.search(line):
        return [Setting(match[2], match[1], where, of_command=True)]
    return []


def _calls(line: str, where: str) -> list[Setting]:
    """Return the settings of ``os.environ["A"] = "b"`` in Python, and ``setenv("A", "b")`` in Lmod."""
    if match := _PYTHON.search(line):
        value = _PYTHON_VALUE.match(match["rest"].strip())
        known = value and (value[2] if value[1] else value[3])
        return [Setting(match["name"], known, where)]
    return [Setting(match[2], match[4], where) for match in _CALL.finditer(line)]


def known_value(value: str) -> str | None:
    """Return the value of a word; None if it contains a variable or a command."""
    text = _DEFAULTED.sub(lambda default: default[1].strip("\"'"), value)
    return None if "$" in text or "`" in text else text


class _Line:
    """Reads the commands of one line, one word after the other, into ``script``."""

    def __init__(self, script: Script, where: str, depth: int = 0) -> None:
        self._script, self._where, self._depth = script, where, depth
        self._command: str | None = None
        self._pending: list[tuple[str, str | None]] = []

    def read(self, line: str) -> None:
        """Read all words of ``line``."""
        words = list(_words(line))
        for position, word in enumerate(words):
            rest = words[position + 1 :]
            if word in _ENDS or word[0] in _SEPARATORS:
                self._end_command()
            elif self._command is None:
                self._first(word, rest)
            else:
                self._further(word, rest)
        self._end_command()

    def _first(self, word: str, rest: Sequence[str]) -> None:
        match = _ASSIGNMENT.fullmatch(word)
        if match:
            self._pending.append((match[1], known_value(match[2])))
            self._split_list(match[1], match[2], rest)
        elif word not in _BEFORE and not word.startswith("-"):
            self._command = word
            self._script.commands += 1
            if word in _TWO_WORDS or word in ("set", "ENV", "ARG"):
                self._two_words(word, rest)

    def _two_words(self, command: str, rest: Sequence[str]) -> None:
        """Read ``setenv A b`` of csh and Tcl, ``set -x A b`` of fish, ``ENV A b`` of Docker."""
        if command == "set":
            if "-a" in rest or "allexport" in rest:
                self._script.exports_all = True
            options = [word for word in rest if word.startswith("-")]
            if not any("x" in option.lstrip("-") for option in options):
                return
            rest = [word for word in rest if not word.startswith("-")]
        if len(rest) >= 2 and re.fullmatch(_NAME, rest[0]) and is_of_network(rest[0]):
            self._add(rest[0], known_value(rest[1]))

    def _further(self, word: str, rest: Sequence[str]) -> None:
        command = (self._command or "").rpartition("/")[2]
        match = _ASSIGNMENT.fullmatch(word)
        if command in _EXPORTING or command in ("ENV", "ARG"):
            self._exported(word, rest, match)
        elif command in ("echo", "printf") and any(one.startswith(">") for one in rest):
            # The line goes into a file: echo "export A=b" >> ~/.bashrc
            for one in _ASSIGNMENT_IN_TEXT.finditer(word):
                self._add(one[1], known_value(one[2]), of_command=True)
        elif command in _SILENT or word.startswith("--export"):
            return
        elif match or (match := _OPTION.fullmatch(word)):
            for name, value in _parts(match[1], match[2]):
                if is_of_network(name):
                    self._add(name, known_value(value), of_command=True)
            self._split_list(match[1], match[2], rest)
        elif word in _INTEL and len(rest) > 1 and is_of_network(rest[0]):
            if re.fullmatch(_NAME, rest[0]):
                self._add(rest[0], known_value(rest[1]), of_command=True)
        elif re.fullmatch(_NAME, word):
            # `-x NAME` and `-e NAME` hand on the variable of the shell.
            self._script.exported.add(word)
        elif word == "--env-file" and rest:
            self._script.env_files.append((rest[0], self._where))
        elif word.startswith("--env-file="):
            self._script.env_files.append((word.partition("=")[2], self._where))
        else:
            self._inside(word)

    def _exported(self, word: str, rest: Sequence[str], match: re.Match[str] | None) -> None:
        if match:
            self._add(match[1], known_value(match[2]))
            self._split_list(match[1], match[2], rest)
        elif re.fullmatch(_NAME, word):
            self._script.exported.add(word)
            if rest and rest[0] == "=" and is_of_network(word):
                setting = Setting(word, rest[1] if len(rest) > 1 else "", self._where)
                words = f"a blank before or after = sets nothing; write {word}={setting.value}"
                self._script.broken.append((setting, words))

    def _split_list(self, name: str, value: str, rest: Sequence[str]) -> None:
        """Report ``A=b, c``: for the shell, the blank ends the value."""
        if value.endswith(",") and rest and rest[0][0] not in _SEPARATORS and is_of_network(name):
            setting = Setting(name, value, self._where)
            words = f"the blank ends the value before {rest[0]!r}; write {name}={value}{rest[0]}"
            self._script.broken.append((setting, words))

    def _inside(self, word: str) -> None:
        """Read the script in a word, as of ``bash -c 'export A=b; python x.py'``, or JSON with variables."""
        if "=" in word and re.search(r"\s|;", word) and self._depth < _DEEP:
            inner = _Line(self._script, self._where, self._depth + 1)
            for line in re.sub(r"^--?[\w-]+=", "", word).splitlines():
                inner.read(line)
        for name, value in _JSON.findall(word):
            if is_of_network(name):
                self._add(name, known_value(value), of_command=True)

    def _add(self, name: str, value: str | None, *, of_command: bool = False) -> None:
        bare = _CONTAINER.sub("", name)
        own = of_command or bare != name or self._depth > 0
        self._script.settings.append(Setting(bare, value, self._where, own))

    def _end_command(self) -> None:
        for name, value in self._pending:
            if self._command is not None:
                self._add(name, value, of_command=True)
                continue
            if not name.isupper():
                # Without an export, a name in lower case is a variable of the script.
                continue
            setting = Setting(name, value, self._where)
            self._script.settings.append(setting)
            self._script.plain.append(setting)
        self._command, self._pending = None, []


def _words(line: str) -> Iterator[str]:
    """Yield the words of ``line`` without quotes; a quote that the line does not close ends it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace_split = True
    try:
        yield from filter(None, lexer)
    except ValueError:
        # A text over several lines begins here. The value of an assignment is not complete.
        if not _ASSIGNMENT.match(lexer.token):
            yield from lexer.token.split()


def _parts(name: str, value: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of ``A=b,C=d``, as Apptainer's --env and qsub's -v take them."""
    for part in re.split(rf",(?={_NAME}=)", f"{name}={value}"):
        match = _ASSIGNMENT.fullmatch(part)
        if match:
            yield match[1], match[2]
