"""The settings that a search tries, read from the data file of this package."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hpcrun.network.nccl.versions import version_key

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
