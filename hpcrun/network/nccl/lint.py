"""Lint of the environment of a job: each setting separately, and the settings together.

The settings come from the environment, or from the lines of a shell script or a Python program.
"""

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from hpcrun.network.nccl.rules import (
    PARTLY_KNOWN,
    Combination,
    Level,
    Setting,
    Variable,
    concerns_nccl,
    effective,
    is_old_distance,
    number,
    prefix_trap,
    rules,
    shared_file,
    version_key,
    wrong_value,
)

ORDER: dict[Level, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class NcclFinding:
    """A statement about one setting. ``source``: key of the source in ``rules().sources``."""

    level: Level
    setting: Setting
    message: str
    source: str

    def as_record(self) -> dict[str, str | None]:
        """Return the finding as one flat JSON object, the source as an address."""
        return {
            "level": self.level,
            "name": self.setting.name,
            "value": self.setting.value,
            "where": self.setting.where,
            "message": self.message,
            "source": rules().sources[self.source],
        }


def by_severity(findings: list[NcclFinding]) -> list[NcclFinding]:
    """Return the findings without repetitions, errors first, then in the order of the names."""
    unique = {(one.setting.name, one.setting.where, one.message): one for one in findings}
    return sorted(unique.values(), key=lambda one: (ORDER[one.level], one.setting.name))


def lint(settings: Iterable[Setting], nccl: str | None = None) -> list[NcclFinding]:
    """Return the findings about ``settings``, errors first.

    Args:
        settings: in their order of execution; the last setting of a name counts.
        nccl: the version of NCCL of the job; None means the newest that the rules know.
    """
    version = nccl or rules().newest
    last = effective(settings)
    findings: list[NcclFinding] = []
    for setting in last.values():
        variable = rules().variables.get(setting.name)
        if variable is None:
            findings += _unknown(setting)
        else:
            findings += _known(setting, _applying(variable, version, last), version)
    return by_severity(findings + combined_findings(last, version))


def _applying(variable: Variable, version: str, others: Iterable[str]) -> Variable:
    """Return ``variable`` with the remarks for this version, and its kind among the ``others``."""
    prefix, key = variable.system_with, version_key(version)
    remarks = tuple(one for one in variable.remarks if key >= version_key(one.since))
    kind = "system" if prefix and any(name.startswith(prefix) for name in others) else variable.kind
    return replace(variable, remarks=remarks, kind=kind)


def _unknown(setting: Setting) -> list[NcclFinding]:
    """Return the finding for a name that no library reads: an error if a similar name exists, else a warning.

    A network plugin may read further names. libfabric and gloo do: only a name with a letter too many or too
    few is reported for them.
    """
    if setting.name.startswith(PARTLY_KNOWN):
        near = difflib.get_close_matches(setting.name, rules().variables, n=1, cutoff=0.94)
        message = f"not a known variable; did you mean {''.join(near)}?"
        long = [name for name in near if len(name) != len(setting.name)]
        return [NcclFinding("warning", setting, message, "env") for _ in long]
    if not concerns_nccl(setting.name):
        return []
    near = difflib.get_close_matches(setting.name, rules().variables, n=1, cutoff=0.86)
    if near and rules().variables[near[0]].kind != "removed":
        message = f"no library reads this name; did you mean {near[0]}?"
        return [NcclFinding("error", setting, message, "env")]
    return [NcclFinding("warning", setting, "neither NCCL nor PyTorch reads this name", "env")]


def _known(setting: Setting, variable: Variable, version: str) -> list[NcclFinding]:
    unread = _not_read(setting, variable, version)
    if unread:
        return [unread]
    findings = [_renamed(setting, variable, version), _in_production(setting, variable)]
    if setting.value is not None:
        findings += _about_value(setting, variable, setting.value)
    return [finding for finding in findings if finding]


def _not_read(setting: Setting, variable: Variable, version: str) -> NcclFinding | None:
    """Return the finding that the job's version of the library does not read the variable, or None."""
    if variable.library == "unread":
        return _finding("error", setting, variable, "no library reads this name")
    if variable.library != "nccl":
        return None
    if variable.until and version_key(version) >= version_key(variable.until):
        return _finding("error", setting, variable, f"removed in NCCL {variable.until}")
    if variable.since and version_key(version) < version_key(variable.since):
        message = f"NCCL {version} does not read this name; NCCL {variable.since} does"
        return _finding("warning", setting, variable, message)
    return None


def _renamed(setting: Setting, variable: Variable, version: str) -> NcclFinding | None:
    if variable.deprecated is None:
        return None
    old = variable.library != "nccl" or version_key(version) >= version_key(variable.deprecated)
    if not old:
        return None
    of = "PyTorch" if variable.library == "torch" else "NCCL"
    message = f"an old spelling since {of} {variable.deprecated}"
    if variable.kind != "renamed" and variable.instead is None:
        message = f"deprecated since {of} {variable.deprecated}"
    return _finding("warning", setting, variable, message)


def _in_production(setting: Setting, variable: Variable) -> NcclFinding | None:
    """Return the finding that a debugging variable is set; at its default value it has no effect."""
    if setting.value == "":
        return None
    if variable.default is not None and setting.value == variable.default:
        return _finding("note", setting, variable, "is the default; the line has no effect")
    if variable.kind != "debugging" or variable.deprecated:
        return None
    message = "for debugging and tuning; remove it from production, or measure that it helps"
    return _finding("warning", setting, variable, message)


def _about_value(setting: Setting, variable: Variable, value: str) -> list[NcclFinding]:
    findings = []
    wrong = wrong_value(variable, value)
    if wrong:
        findings.append(_finding("error", setting, variable, wrong))
    if is_old_distance(variable, value):
        message = "a number means another distance in another version; write PIX, PXB, PHB or SYS"
        findings.append(_finding("warning", setting, variable, message))
    if trap := prefix_trap(variable, value):
        # Hosts with ten RDMA devices of one name are common, hosts with ten interfaces are not.
        level: Level = "warning" if variable.type == "devices" else "note"
        findings.append(_finding(level, setting, variable, trap))
    if shared := shared_file(variable, value):
        findings.append(_finding("warning", setting, variable, shared))
    if value and not wrong:
        findings += _remarks(setting, variable, value)
    return findings


def _remarks(setting: Setting, variable: Variable, value: str) -> list[NcclFinding]:
    return [
        NcclFinding(remark.level, setting, remark.advice, remark.source)
        for remark in variable.remarks
        if "*" in remark.values or value.upper() in map(str.upper, remark.values)
    ]


def _finding(level: Level, setting: Setting, variable: Variable, message: str) -> NcclFinding:
    parts = [message]
    if variable.kind in ("removed", "renamed") or variable.deprecated:
        parts += [f"use {variable.instead}"] if variable.instead else []
        parts += [variable.advice] if variable.advice else []
    return NcclFinding(level, setting, "; ".join(parts), variable.source)


def combined_findings(settings: Mapping[str, Setting], version: str) -> list[NcclFinding]:
    """Return a finding for each combination that occurs in ``settings``, with this version of NCCL."""
    findings: list[NcclFinding] = []
    for rule in rules().combinations:
        if version_key(version) >= version_key(rule.since) and _holds(rule, settings):
            findings += [
                NcclFinding(rule.level, settings[name], rule.advice, rule.source)
                for name in _about(rule, settings)
            ]
    return findings


def _about(rule: Combination, settings: Mapping[str, Setting]) -> list[str]:
    if not rule.about.endswith("*"):
        return [rule.about] if rule.about in settings else []
    prefix = rule.about.removesuffix("*")
    named = set(rule.when)
    return [name for name in settings if name.startswith(prefix) and name not in named]


def _holds(rule: Combination, settings: Mapping[str, Setting]) -> bool:
    return all(_meets(settings.get(name), condition) for name, condition in rule.when.items())


def _meets(setting: Setting | None, condition: str) -> bool:
    """Return True if a setting meets a condition; an unknown value meets only ``set``."""
    if condition == "unset":
        return setting is None
    if condition == "!=1" and setting is None:
        return True
    if setting is None or setting.value == "":
        return False
    if condition == "set":
        return True
    return setting.value is not None and _matches(setting.value, condition)


def _matches(value: str, condition: str) -> bool:
    if condition.startswith("!="):
        return value.lower() != condition[2:].lower()
    if condition.startswith("="):
        return value.lower() == condition[1:].lower()
    if condition.startswith("has:"):
        excluded = value.startswith("^") or ":^" in value
        words = value.lower().replace(";", ",").replace(":", ",").replace(" ", ",").split(",")
        return not excluded and condition[4:].lower() in words
    found = number(value)
    if found is None:
        return False
    limit = int(condition[1:])
    return found > limit if condition[0] == ">" else found < limit


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
    for place, line in _lines(text):
        where = f"{name}:{place}"
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
    for place, line in _lines(text):
        for words in _export_lists(line):
            for (one, value), (rest, of_rest) in pairwise(words):
                # In capitals, the word is a variable to pass on (PATH), not the rest of a value (mlx5_1).
                if value is None or of_rest is not None or re.fullmatch(r"[A-Z_][A-Z0-9_]*", rest):
                    continue
                message = (
                    f"--export cuts the value at its comma: the job gets {value!r} and not {rest!r}; "
                    "write `export` lines in the script"
                )
                setting = Setting(one, value, f"{name}:{place}")
                findings.append(NcclFinding("error", setting, message, "srun"))
    return findings


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each logical line; a backslash at the end joins two lines."""
    joined, start = "", 0
    for place, raw in enumerate([*text.splitlines(), ""], start=1):
        start = start if joined else place
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
