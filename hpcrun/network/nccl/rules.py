"""The rules about variables, read from the data files of this package."""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter

Level = Literal["error", "warning", "note"]

_FOLDER = Path(__file__).with_name("rules")
_LIBRARIES = ("nccl", "plugins", "libfabric", "torch", "rccl", "unread")


@dataclass(frozen=True)
class Remark:
    """A statement about particular values of a variable; ``*`` means every value.

    ``since``: the version of the library from which the statement is true.
    """

    values: tuple[str, ...]
    level: Level
    advice: str
    source: str
    since: str = "0"


@dataclass(frozen=True)
class Variable:
    """A variable that a library reads, used to read, or never read. The data file explains the fields."""

    name: str
    library: str
    kind: str
    source: str
    since: str | None = None
    until: str | None = None
    deprecated: str | None = None
    instead: str | None = None
    type: str | None = None
    choices: tuple[str, ...] = ()
    min: int | None = None
    max: int | None = None
    default: str | None = None
    form: str | None = None
    wrong: str | None = None
    advice: str | None = None
    system_with: str | None = None
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True)
class Combination:
    """Settings that conflict, or have no effect without each other. ``since``: from this NCCL on."""

    about: str
    level: Level
    advice: str
    source: str
    when: Mapping[str, str] = field(default_factory=dict)
    since: str = "0"


@dataclass(frozen=True)
class Rules:
    """Everything in the data files. ``newest``: the version of NCCL that the rules were written for."""

    variables: Mapping[str, Variable]
    combinations: tuple[Combination, ...]
    sources: Mapping[str, str]
    newest: str


@functools.cache
def rules() -> Rules:
    """Return the rules of this package; the files are read once."""
    data = _read("variables.yaml")
    entries = [entry | {"library": name} for name in _LIBRARIES for entry in data[name]]
    variables = {one.name: one for one in TypeAdapter(list[Variable]).validate_python(entries)}
    combinations = TypeAdapter(tuple[Combination, ...]).validate_python(_read("combinations.yaml"))
    return Rules(variables, combinations, data["sources"], data["newest"]["nccl"])


def _read(name: str) -> Any:
    # The parser in C takes a tenth of the time, and some builds of PyYAML lack it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((_FOLDER / name).read_text(encoding="utf-8"), loader)


PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "RCCL_", "OFI_NCCL_")
"""The prefixes of libraries that the rules know completely."""
PARTLY_KNOWN = ("GLOO_", "FI_", "TORCH_DISTRIBUTED_")
"""The prefixes of libraries that read further variables."""
_OF_GOOGLE = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_SHIMNET_")


@dataclass(frozen=True)
class Setting:
    """One variable. ``value`` is None if only the shell of the job knows it."""

    name: str
    value: str | None
    where: str


def settings_of(environ: Mapping[str, str], where: str) -> list[Setting]:
    """Return a setting for each variable of ``environ``, in the order of the names."""
    return [Setting(name, environ[name], where) for name in sorted(environ)]


def effective(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return the last setting of each name: the setting that the job sees."""
    return {setting.name: setting for setting in settings}


def concerns_nccl(name: str) -> bool:
    """Return True for a name of NCCL, RCCL or PyTorch's NCCL process group, but not of Google's plugins."""
    return name.startswith(PREFIXES) and not name.startswith(_OF_GOOGLE)


# The numbers that strtoll(…, 0) accepts, with which NCCL reads them.
_NUMBER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)")
_LISTS = ("devices", "interfaces", "exact-interfaces")
_PER_PROCESS = ("%p", "%h")
_TRAILING_NUMBER = re.compile(r"[A-Za-z_]+\d*[A-Za-z_]+(\d)|[A-Za-z]+(\d)")


def number(value: str) -> int | None:
    """Return the number that NCCL reads from ``value``; None if it is not a number."""
    text = value.strip()
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return int(text, 0)
    except ValueError:
        # "010" is octal for strtoll and an error for Python.
        return int(text, 8) if re.fullmatch(r"[+-]?0[0-7]+", text) else None


def wrong_value(variable: Variable, value: str) -> str | None:
    """Return the problem of ``value``, with the valid values; None without a problem.

    An empty value is valid: for NCCL an empty variable is not set.
    """
    if value == "":
        return None
    if variable.type in _LISTS and len(value.split()) > 1:
        return f"has a space, which counts as part of a name; write {''.join(value.split())}"
    if variable.type == "flag":
        fits = number(value) in (0, 1) or (_of_c10d(variable) and value.lower() in _C10D_WORDS)
        return None if fits else f"should be 0 or 1, not {value}"
    if variable.min is not None or variable.max is not None:
        return _wrong_number(variable, value)
    if variable.type in ("distance", "exact"):
        return _wrong_exact(variable, value)
    if variable.type == "selection":
        return _wrong_selection(variable, value)
    if variable.type == "set":
        return _wrong_set(variable, value)
    if variable.form is not None:
        fits = re.fullmatch(variable.form, value, re.IGNORECASE) is not None
    else:
        fits = not variable.choices or value.upper() in map(str.upper, variable.choices)
    more = f"; {variable.wrong}" if variable.wrong else ""
    return None if fits else f"should be {_one_of(variable.choices)}, not {value}{more}"


# c10d's getCvarBool() takes these words too; NCCL reads every word as 0.
_C10D_WORDS = ("y", "yes", "t", "true", "n", "no", "f", "false")


def _of_c10d(variable: Variable) -> bool:
    return variable.library == "torch" and concerns_nccl(variable.name)


def _wrong_number(variable: Variable, value: str) -> str | None:
    found = number(value)
    low, high = variable.min, variable.max
    if found is None:
        return f"should be a whole number, not {value}; the default is used"
    if low is not None and high is not None and not low <= found <= high:
        return f"should be {low} to {high}, not {value}"
    if low is not None and found < low:
        return f"should be at least {low}, not {value}"
    return None


def _wrong_exact(variable: Variable, value: str) -> str | None:
    """Check a value that NCCL compares with strcmp(), so that its case counts."""
    if value in variable.choices or is_old_distance(variable, value):
        return None
    case = "; NCCL does not ignore the case" if value.upper() in variable.choices else ""
    return f"should be {_one_of(variable.choices)}, not {value}{case}"


def is_old_distance(variable: Variable, value: str) -> bool:
    """Return True if a distance is given as a number, which names another distance in another version."""
    return variable.type == "distance" and number(value) is not None


_FUNCTIONS = ("allgather", "allreduce", "broadcast", "reduce", "reducescatter")


def _wrong_selection(variable: Variable, value: str) -> str | None:
    """Check ``ring,tree`` and, since 2.24, ``ring;allreduce:^tree``.

    NCCL skips an empty word, and removes no blank.
    """
    known = {choice.lower() for choice in variable.choices}
    for position, part in enumerate(filter(None, value.split(";"))):
        function, colon, names = part.rpartition(":")
        if colon and function.lower() not in _FUNCTIONS:
            return f"has {function!r} before a colon; known are {', '.join(_FUNCTIONS)}"
        if position and not colon:
            return f"has {part!r} without a collective: only the first part may have none"
        for word in filter(None, names.removeprefix("^").split(",")):
            if word.lower() not in known:
                return f"has {word!r}; known are {', '.join(variable.choices)}"
    return None


def _wrong_set(variable: Variable, value: str) -> str | None:
    """Check ``INIT,NET`` or ``^INIT,NET``. NCCL skips an empty word, and removes blanks."""
    for word in filter(None, map(str.strip, value.removeprefix("^").split(","))):
        if word.upper() not in variable.choices:
            return f"has {word!r}; known are {', '.join(variable.choices)}"
    return None


def prefix_trap(variable: Variable, value: str) -> str | None:
    """Return which further devices or interfaces a name matches without ``=``; None if there are none.

    NCCL matches prefixes: ``mlx5_1`` is also mlx5_10 to mlx5_19. It reads at most 32 devices, so that
    the numbers 1 to 3 are the ones that can match two-digit numbers.
    """
    if variable.type not in ("devices", "interfaces") or not value:
        return None
    names = value.removeprefix("^")
    if names.startswith("="):
        return None
    for name in names.split(","):
        bare = name.partition(":")[0].strip()
        found = _TRAILING_NUMBER.fullmatch(bare)
        digit = found and (found[1] or found[2])
        if digit in ("1", "2", "3"):
            last = f"{bare}9" if digit in ("1", "2") else f"{bare}1"
            sign = "^=" if value.startswith("^") else "="
            return f"{bare} also matches {bare}0 to {last}; write {sign}{names}"
    return None


def shared_file(variable: Variable, value: str) -> str | None:
    """Return why all processes would write to one file; None if each process has a separate file."""
    if variable.type != "file-per-process" or not value or value.startswith("/dev/std"):
        return None
    missing = [field for field in _PER_PROCESS if field not in value]
    if not missing:
        return None
    return f"all processes would write to the same file; add {' and '.join(missing)} to the name"


def _one_of(choices: tuple[str, ...]) -> str:
    return ", ".join(choices[:-1]) + f" or {choices[-1]}"


_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def version_key(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparing: ``2.30.7-1`` becomes (2, 30, 7)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("-")[0].split("+")[0]))


def is_version(text: str) -> bool:
    """Return True if ``text`` is a version such as 2.27 or 2.27.5."""
    return re.fullmatch(r"\d+\.\d+(\.\d+)?(-\d+)?", text) is not None


def installed_nccl() -> str | None:
    """Return the version of the NCCL wheel of this Python; None if there is none."""
    for wheel in _WHEELS:
        try:
            return metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    return None
