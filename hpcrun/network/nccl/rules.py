"""The rules about variables, read from the data files of this package."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Level = Literal["error", "warning", "note"]

_FOLDER = Path(__file__).with_name("rules")
_LIBRARIES = ("nccl", "plugins", "libfabric", "torch", "rccl", "unread")


@dataclass(frozen=True)
class Remark:
    """A statement about particular values of a variable; ``*`` means every value."""

    values: tuple[str, ...]
    level: Level
    advice: str
    source: str


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
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True)
class Combination:
    """Settings that conflict, or have no effect without each other."""

    about: str
    level: Level
    advice: str
    source: str
    when: Mapping[str, str]
    relation: Mapping[str, Any]


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
    variables = {
        entry["name"]: _variable(library, entry)
        for library in _LIBRARIES
        for entry in data[library]
    }
    combinations = tuple(_combination(entry) for entry in _read("combinations.yaml"))
    return Rules(variables, combinations, data["sources"], data["newest"]["nccl"])


def _read(name: str) -> Any:
    # The parser in C takes a tenth of the time, and some builds of PyYAML lack it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((_FOLDER / name).read_text(encoding="utf-8"), loader)


def _variable(library: str, entry: Mapping[str, Any]) -> Variable:
    fields = dict(entry)
    remarks = tuple(
        Remark(tuple(remark["values"]), remark["level"], remark["advice"], remark["source"])
        for remark in fields.pop("remarks", [])
    )
    choices = tuple(fields.pop("choices", ()))
    return Variable(library=library, choices=choices, remarks=remarks, **fields)


def _combination(entry: Mapping[str, Any]) -> Combination:
    return Combination(
        about=entry["about"],
        level=entry["level"],
        advice=entry["advice"],
        source=entry["source"],
        when=entry.get("when", {}),
        relation=entry.get("relation", {}),
    )
