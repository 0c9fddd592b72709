"""The rules about variables, read from the data files of this package."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    relation: Mapping[str, Any] = field(default_factory=dict)
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
