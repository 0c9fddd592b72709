"""The settings that a search tries, read from the data file of this package.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hpcrun.errors import NetworkError
from hpcrun.network.nccl.rules import version_key

Env = Mapping[str, str]

_FILE = Path(__file__).with_name("knobs.yaml")
_INTERFACES = "@interfaces"


@dataclass(frozen=True)
class Knob:
    """Settings; a search chooses one of them, or none. The data file explains the fields."""

    name: str
    why: str
    options: tuple[Env, ...]
    order: bool
    source: str
    where: str | None = None
    since: str | None = None


@dataclass(frozen=True)
class Site:
    """The facts by which knobs are chosen.

    ``interfaces``: the interfaces of every node. ``rdma``: the nodes have RDMA devices. ``version``: of the
    library, None if unknown.
    """

    nodes: int
    ranks: int
    interfaces: tuple[str, ...] = ()
    rdma: bool = False
    version: str | None = None


def knobs_for(backend: str, site: Site, base: Env, *, deterministic: bool = False) -> list[Knob]:
    """Return the knobs that make sense at a site.

    Args:
        base: the present environment; an option that is set there is not tried.
        deterministic: exclude knobs that can change the order of addition.
    """
    knobs, _ = _data()
    found = []
    for knob in knobs[backend]:
        if (deterministic and knob.order) or not _fits(knob, site):
            continue
        options = tuple(
            option
            for option in _with_interfaces(knob.options, site.interfaces)
            if any(base.get(name) != value for name, value in option.items())
        )
        if options:
            found.append(replace(knob, options=options))
    return found


def page_of(knob: Knob) -> str:
    """Return the address of the page that documents the variables of ``knob``."""
    return _data()[1][knob.source]


def changes_order(env: Env) -> list[str]:
    """Return the variables of ``env`` that can change the order of addition, according to the data file."""
    knobs, _ = _data()
    known = {
        name
        for backend in knobs.values()
        for knob in backend
        if knob.order
        for option in knob.options
        for name in option
    }
    return sorted(known & env.keys())


def _fits(knob: Knob, site: Site) -> bool:
    if knob.since and site.version and version_key(site.version) < version_key(knob.since):
        return False
    several = site.nodes > 1
    return {
        None: True,
        "nodes": several,
        "node": site.ranks > site.nodes,
        "ib": several and site.rdma,
        "sockets": several and not site.rdma,
    }[knob.where]


def _with_interfaces(options: Sequence[Env], interfaces: Sequence[str]) -> Iterable[Env]:
    for option in options:
        if _INTERFACES not in option.values():
            yield option
            continue
        for interface in interfaces:
            yield {
                name: interface if value == _INTERFACES else value for name, value in option.items()
            }


@functools.cache
def _data() -> tuple[Mapping[str, tuple[Knob, ...]], Mapping[str, str]]:
    data: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    sources = data.pop("sources")
    return {
        backend: tuple(Knob(**{**entry, "options": tuple(entry["options"])}) for entry in entries)
        for backend, entries in data.items()
    }, sources


COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "alltoall",
    "sendrecv",
)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MOST = 64 << 30


@dataclass(frozen=True, order=True)
class Cell:
    """A collective with a size in bytes: of the whole array, as in nccl-tests."""

    collective: str
    size: int


@dataclass(frozen=True)
class Timing:
    """``seconds`` of one call on the slowest rank, the lower quartile; ``wrong``: wrong elements."""

    seconds: float
    wrong: int = 0


@dataclass(frozen=True)
class Trial:
    """The times of one fresh process group. ``problem``: the reason if there are none."""

    timings: Mapping[Cell, Timing] = field(default_factory=dict)
    problem: str | None = None


def bus_factor(collective: str, ranks: int) -> float:
    """Return the factor from algbw to busbw."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "alltoall"):
        return (ranks - 1) / ranks
    return 1.0


def bandwidths(cell: Cell, seconds: float, ranks: int) -> tuple[float, float]:
    """Return algbw and busbw in bytes per second."""
    algbw = cell.size / seconds
    return algbw, algbw * bus_factor(cell.collective, ranks)


def sizes_of(text: str) -> list[int]:
    """Return the sizes of ``8:1G:16``: from 8 bytes to 1 GiB, each 16 times the one before.

    The last size is always measured.

    Raises:
        NetworkError: the text is not such a range.
    """
    words = text.split(":")
    try:
        first, last = _bytes(words[0]), _bytes(words[1] if words[1:] else words[0])
        factor = int(words[2]) if words[2:] else 2
    except (ValueError, KeyError):
        first, last, factor = 0, 0, 0
    if len(words) > 3 or not 4 <= first <= last <= _MOST or factor < 2:
        raise NetworkError(
            f"--sizes {text}: should be FIRST:LAST:FACTOR such as 8:1G:16, from 4 bytes up to 64G, with a "
            "factor of 2 or more"
        )
    found = [first]
    while found[-1] * factor < last:
        found.append(found[-1] * factor)
    return found + ([last] if last > first else [])


def collectives_of(text: str) -> list[str]:
    """Return the names in a list with commas.

    Raises:
        NetworkError: a name is unknown.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in COLLECTIVES:
            raise NetworkError(
                f"--collectives {name}: no such collective; there is: {', '.join(COLLECTIVES)}"
            )
    return list(dict.fromkeys(names))


def trial_from(answers: Sequence[Mapping[str, Any]]) -> dict[Cell, Timing]:
    """Return the times in the answers of a rank."""
    return {
        Cell(one["collective"], one["size"]): Timing(one["seconds"], one["wrong"])
        for one in answers
        if one["type"] == "cell"
    }


def _bytes(text: str) -> int:
    number = text.upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in ("K", "M", "G") else ""
    return int(number.removesuffix(unit)) * _UNITS[unit]
