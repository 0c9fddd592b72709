"""Value types shared by several keys, with checks for values that would fail only on the cluster.

A value for sbatch, a shell or the file system is checked here, because the message can still name its line in
the config.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
)

from hpcrun.config.problems import ENV_NAME, MASK, value_text
from hpcrun.config.slurm_options import joined_items

_NAME_MARKS = "._-+=@"
_NAME_CHARACTERS = 100
_NAME_BYTES = 200  # a folder name may have 255 bytes; hpcrun appends suffixes
_MAX = 10**12  # of steps, samples or seconds; more is a typing error
_MAX_NODES = 10**6  # more is a typing error
_ONE_COUNT = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_COUNTS = re.compile(r"([0-9]{1,18}) *- *([0-9]{1,18})", re.ASCII)
_READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
_MEMORY = re.compile(r"[0-9]+[KMGT]?", re.IGNORECASE)
TYPED_GPUS = re.compile(
    r"(?:gpu:)?(?:(?P<type>[A-Za-z0-9][\w.-]*):)?(?P<count>[0-9]{1,6})", re.ASCII
)
"""Form of ``job.gpus`` with a type, as in Slurm's ``--gres``."""
_BUILTIN_TASK = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TIME = re.compile(
    r"(?P<days>\d{1,9})-(?P<day_hours>\d{1,9})(:(?P<day_minutes>\d{1,9})(:(?P<day_seconds>\d{1,9}))?)?"
    r"|((?P<hours>\d{1,9}):)?(?P<minutes>\d{1,9}):(?P<seconds>\d{1,9})"
    r"|(?P<only_minutes>\d{1,9})",
    re.ASCII,
)
# [docker://][REGISTRY/]NAME[:TAG][@DIGEST]
_REFERENCE = re.compile(
    r"(docker://)?[a-z0-9][\w.-]*(:\d+)?(/[a-z0-9][\w.-]*)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
_TIME_WAYS = "write HH:MM:SS, D-HH:MM:SS or a number of minutes"


def _refuse_bool(value: object) -> object:
    # Python counts true as 1, but `nodes: true` is a typing error.
    if isinstance(value, bool):
        raise ValueError(f"should be a number, not {value_text(value)}")
    return value


def check_name(name: str) -> str:
    """Return the run name ``name`` in composed Unicode form (NFC), valid for a directory and a job name.

    The composed form gives the same run directory for the same letters typed on two machines. Source:
    Unicode Standard Annex 15.

    Raises:
        ValueError: the name is invalid; the text has the remedy.
    """
    name = unicodedata.normalize("NFC", name)
    if name and name[0].isalnum() and all(_in_name(letter) for letter in name):
        if len(name) > _NAME_CHARACTERS or len(name.encode()) > _NAME_BYTES:
            raise ValueError(
                f"has {len(name)} characters ({len(name.encode())} bytes); "
                f"shorten it to at most {_NAME_CHARACTERS} characters and {_NAME_BYTES} bytes"
            )
        return name
    raise ValueError(
        f"should be letters, digits and {' '.join(_NAME_MARKS)} with a letter or digit first, "
        f"not {value_text(name)}; try {_cleaned(name)}"
    )


def _in_name(letter: str) -> bool:
    return letter.isalnum() or letter in _NAME_MARKS or unicodedata.category(letter)[0] == "M"


def _cleaned(name: str) -> str:
    kept = "".join(letter if _in_name(letter) else " " for letter in name)
    return "-".join(kept.split()).lstrip(_NAME_MARKS)[:40].rstrip("-") or "run-1"


def _check_task(task: str) -> str:
    module, colon, name = task.partition(":")
    if colon and (module.endswith(".py") or "/" in module):
        meant = module.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
        raise ValueError(
            f"is a file name; a task needs a module name: did you mean {meant}:{name}?"
        )
    if _BUILTIN_TASK.fullmatch(task):
        return task
    if colon and all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        return task
    raise ValueError(
        "should be the name of a built-in task, such as language-model, or package.module:Class, "
        f"not {value_text(task)}"
    )


def time_seconds(time: str) -> int:
    """Return the seconds of a time limit in any form of sbatch(1) `--time`.

    Raises:
        ValueError: the text has another form, or is zero, which Slurm takes as "no limit".
    """
    match = _TIME.fullmatch(time.strip())
    if match is None:
        raise ValueError(f"should be a time limit, not {value_text(time)}; {_TIME_WAYS}")
    part = {name: int(digits) for name, digits in match.groupdict().items() if digits}
    hours = 24 * part.get("days", 0) + part.get("day_hours", 0) + part.get("hours", 0)
    minutes = part.get("day_minutes", 0) + part.get("minutes", 0) + part.get("only_minutes", 0)
    seconds = 3600 * hours + 60 * minutes + part.get("day_seconds", 0) + part.get("seconds", 0)
    if seconds == 0:
        raise ValueError("should be longer than zero; omit it to use the partition's limit")
    return seconds


def _as_time(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # minutes, as sbatch reads a number without unit
    if not isinstance(value, str):
        if value is None:
            return None
        raise ValueError(f"should be a time limit, not {value_text(value)}; {_TIME_WAYS}")
    minutes, seconds = divmod(time_seconds(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02d}:{minutes:02d}:{seconds:02d}"
    return f"{days}-{clock}" if days else clock


def _check_memory(memory: str) -> str:
    if not _MEMORY.fullmatch(memory):
        raise ValueError(f"should be a size such as 64G or 512M, not {value_text(memory)}")
    return memory.upper()


def _check_word(word: str) -> str:
    # A space, quote, # or line break would end the option's value inside a `#SBATCH` line.
    if not word:
        raise ValueError("is empty; omit the key, or write null")
    if bad := [letter for letter in word if not letter.isprintable() or letter in " \t\"'\\#`"]:
        raise ValueError(f"may not contain {value_text(bad[0])}: {value_text(word)}")
    return word


def _check_option(option: str) -> str:
    _check_text(option)
    if not option.startswith("-") or "\n" in option or "\r" in option:
        raise ValueError(
            f"should be one option such as --comment=text, on one line, not {value_text(option)}"
        )
    return option


def _check_env_name(name: str) -> str:
    if not ENV_NAME.fullmatch(name):
        raise ValueError(
            "is not a valid name of an environment variable; use letters, digits and _, no digit first"
        )
    if name in _READ_ONLY:
        raise ValueError("is a variable that bash keeps read-only; remove it")
    return name


def _check_text(text: str) -> str:
    if "\0" in text:
        raise ValueError("may not contain a NUL character, which no program accepts")
    if text == MASK:
        raise ValueError(f"is a masked value ({MASK}); write the value itself")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"is not UTF-8 text: {value_text(text)}") from None
    return text


def _check_interface(names: str) -> str:
    if names == "auto":
        raise ValueError(
            "auto is no longer a choice; name the interfaces, such as ib0, or omit the key"
        )
    return names


def _check_image(image: str) -> str:
    _check_text(image)
    if image.startswith(("/", "./", "../", "~")) or image.endswith((".sif", ".sqsh")):
        return _check_no_comma(image)
    if not _REFERENCE.fullmatch(image):
        raise ValueError(
            "should be a .sif or .sqsh file, a path with / or ./ in front, or a reference to a registry such "
            f"as docker://nvcr.io/nvidia/pytorch:26.05-py3, not {value_text(image)}"
        )
    return image


def _check_mount(mount: str) -> str:
    _check_no_comma(_check_text(mount))
    source, _, rest = mount.partition(":")
    target, _, mode = rest.partition(":")
    if not all(path.startswith("/") for path in (source, target or "/")) or mode not in ("", "ro"):
        raise ValueError(
            "should be a full path, SOURCE:DESTINATION or SOURCE:DESTINATION:ro, not "
            f"{value_text(mount)}"
        )
    return mount


def _check_no_comma(path: str) -> str:
    # Each runtime separates mounts and names by some of these.
    if bad := next((letter for letter in path if letter in ",\"'\\$\n"), None):
        raise ValueError(f"may not contain {value_text(bad)}: {value_text(path)}")
    return path


def _check_notify(target: str) -> str:
    """No message shows the value: the URL of a webhook is a secret."""
    _check_text(target)
    if not target.strip():
        raise ValueError("is empty; give a command, or omit the key")
    if target.lower().startswith(("http://", "https://")):
        raise ValueError("is a URL; give a command, such as curl -fsS -d @- URL")
    return target


def _check_nodes(value: object) -> int | str:
    if value is None:
        raise ValueError("may not be null; give it a value or omit the key")
    text = str(value).strip()
    known = isinstance(value, int | str) and not isinstance(value, bool)
    found = _COUNTS.fullmatch(text)
    if not known or not (found or _ONE_COUNT.fullmatch(text)):
        kinds = "a whole number, or a range such as 2-4"
        raise ValueError(f"should be {kinds}, not {value_text(value)}")
    least, most = (int(found[1]), int(found[2])) if found else (int(text), int(text))
    if least < 1:
        raise ValueError(f"should be at least 1, not {value_text(value)}")
    if most < least:
        raise ValueError(f"ends before it begins: {value_text(value)}; write {most}-{least}")
    if most > _MAX_NODES:
        raise ValueError(f"should be at most {_MAX_NODES}, not {value_text(value)}")
    return least if least == most else f"{least}-{most}"


def _check_window(window: object) -> object:
    # A single step is read as a number. Steps of a window count from 1.
    text = str(window) if isinstance(window, int) and not isinstance(window, bool) else window
    if not isinstance(text, str):
        return window
    first, dash, last = text.partition("-")
    numbers = [first, last] if dash else [first]
    if not all(part.isdecimal() and int(part) > 0 for part in numbers):
        raise ValueError(f"should be a step or first-last, such as 10-15, not {value_text(text)}")
    if dash and int(last) < int(first):
        raise ValueError(f"ends before it begins: {value_text(text)}")
    return text


def _number_or(pattern: str) -> WithJsonSchema:
    """Return the form of a count in an editor: a number, or a text with this pattern."""
    forms = [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": pattern}]
    return WithJsonSchema({"anyOf": forms})


# The limits come first, because the check wraps the number's schema.
_NUMBER = BeforeValidator(_refuse_bool)
Count = Annotated[int, Field(ge=1, le=_MAX), _NUMBER]
GpuCount = Annotated[
    int,
    Field(ge=1),
    _NUMBER,
    # The merge of layers moves the type to its own key, but an editor sees the file before the merge.
    _number_or("^(gpu:)?([A-Za-z0-9][A-Za-z0-9_.-]*:)?[0-9]+$"),
]
NodeCount = Annotated[
    int | str,
    PlainValidator(_check_nodes),
    _number_or("^[0-9]+(-[0-9]+)?$"),
]
"""A number of nodes, or the text ``2-4``."""
FromZero = Annotated[int, Field(ge=0, le=_MAX), _NUMBER]
Seed = Annotated[int, Field(ge=0, lt=2**63), _NUMBER]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), _NUMBER]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), _NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), _NUMBER]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), _NUMBER]
Shrinking = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), _NUMBER]
Growing = Annotated[float, Field(gt=1, allow_inf_nan=False), _NUMBER]
RunName = Annotated[str, AfterValidator(check_name)]
TaskName = Annotated[str, AfterValidator(_check_task)]
TimeLimit = Annotated[str, BeforeValidator(_as_time)]
Memory = Annotated[str, AfterValidator(_check_memory)]
StepWindow = Annotated[str, BeforeValidator(_check_window)]
Word = Annotated[str, AfterValidator(_check_word)]
Interfaces = Annotated[Word, AfterValidator(_check_interface)]
_Option = Annotated[str, AfterValidator(_check_option)]
SbatchOptions = Annotated[list[_Option], BeforeValidator(partial(joined_items, "sbatch"))]
SrunOptions = Annotated[list[_Option], BeforeValidator(partial(joined_items, "srun"))]
ShellText = Annotated[str, AfterValidator(_check_text)]
Image = Annotated[str, AfterValidator(_check_image)]
Mount = Annotated[str, AfterValidator(_check_mount)]
NotifyTarget = Annotated[str, AfterValidator(_check_notify)]
EnvName = Annotated[str, AfterValidator(_check_env_name)]


def node_limits(nodes: int | str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes of a checked value of ``job.nodes``."""
    least, _, most = str(nodes).partition("-")
    return int(least), int(most or least)


@dataclass(frozen=True)
class SubmitOption:
    """Makes a key an option of `hpcrun submit`, and an argument of ``hpcrun.submit``.

    ``value``: the value in the help of the command, such as ``NAME``; empty: the option is a switch.
    ``sbatch``: the option of sbatch that gets the value in an ``#SBATCH`` line; such a key has no effect
    without Slurm.
    """

    value: str = ""
    sbatch: str = ""


class Section(BaseModel):
    """A section of the config: immutable, without unknown keys.

    Raises:
        pydantic.ValidationError: a key is unknown, or a value is wrong.
    """

    # Only a section that is used without a config needs its own validator.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class TaskSection(Section):
    """A section of the config with further keys, which the task defines and checks."""

    model_config = ConfigDict(extra="allow")

    @property
    def own(self) -> dict[str, object]:
        """Values of the keys that belong to the task, without those of the section itself."""
        return dict(self.model_extra or {})
