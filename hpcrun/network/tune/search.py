"""A search over the knobs that keeps the default unless a setting is faster in almost every pair of trials.

A trial is one observation, independent of its number of calls: the calls of one process group are not
independent. A few trials of each option select the option that looks faster. This choice exaggerates the
gain, so fresh pairs of trials decide: one of the option and one of the present setting, in random order. At
the end, fresh pairs compare the whole setting with the default. A sign test on 9 pairs with at most one
slower pair has p = 10 / 512.
"""

import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
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


@cache
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
_MAX = 64 << 30


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
    """Return the factor from algbw to busbw, as nccl-tests' PERFORMANCE.md defines it."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "alltoall"):
        return (ranks - 1) / ranks
    return 1.0


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
    if len(words) > 3 or not 4 <= first <= last <= _MAX or factor < 2:
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


Measure = Callable[[Env], Trial]
Progress = Callable[[str], None]

SCREENED = 3
PAIRS = 9
SLOWER_PAIRS = 1
MIN_EFFECT = 0.05


@dataclass(frozen=True)
class Comparison:
    """Trials of a setting, each with a trial of the default of the same time.

    ``gain``: 0.1 if the setting takes 1 / 1.1 of the time: the median of the pairs, over the cells.
    ``faster``: the pairs in which the setting is faster.
    """

    gain: float
    faster: int
    pairs: int
    problem: str | None = None

    def holds(self, effect: float) -> bool:
        """Return True if the gain is large enough, in almost all pairs."""
        return (
            self.problem is None
            and self.faster >= self.pairs - SLOWER_PAIRS
            and self.gain >= effect
        )


@dataclass(frozen=True)
class TriedOption:
    """An option of a knob. ``screened``: from the first trials; ``confirmed``: from fresh pairs, if any."""

    knob: Knob
    option: Env
    screened: Comparison
    confirmed: Comparison | None = None
    kept: bool = False


@dataclass
class Found:
    """The result of a search. ``env``: empty if the default stays.

    ``final``: the whole setting against the default. ``setting``, ``default``: the trials of both in this
    comparison. If no setting was chosen, ``default`` has the first trials.
    """

    env: dict[str, str] = field(default_factory=dict)
    tried: list[TriedOption] = field(default_factory=list)
    final: Comparison | None = None
    setting: list[Trial] = field(default_factory=list)
    default: list[Trial] = field(default_factory=list)


def search(
    measure: Measure,
    knobs: Sequence[Knob],
    progress: Progress,
    *,
    effect: float = MIN_EFFECT,
    seed: int = 0,
) -> Found:
    """Find a better setting, or none, by coordinate descent over the knobs.

    Args:
        measure: runs a trial with some variables added to the default.
        progress: called with the name of the measured setting before each trial.
        effect: the smallest gain that counts.
        seed: of the order of the trials.
    """
    generator = random.Random(seed)
    found = Found()
    env: dict[str, str] = {}

    def trials(settings: Sequence[Env], count: int) -> list[list[Trial]]:
        """Measure each setting ``count`` times, in turns, each turn in another order."""
        measured: list[list[Trial]] = [[] for _ in settings]
        for _ in range(count):
            for place in generator.sample(range(len(settings)), len(settings)):
                progress(words(settings[place]))
                measured[place].append(measure(settings[place]))
        return measured

    for knob in knobs:
        present, *others = trials([env, *({**env, **option} for option in knob.options)], SCREENED)
        found.default = found.default or present
        screened = [compare(other, present) for other in others]
        best = max(range(len(screened)), key=lambda place: screened[place].gain)
        confirmed = None
        if screened[best].gain >= effect:
            confirmed = compare(*trials([{**env, **knob.options[best]}, env], PAIRS))
        kept = confirmed is not None and confirmed.holds(effect)
        found.tried += [
            TriedOption(knob, option, first, confirmed, kept)
            if place == best
            else TriedOption(knob, option, first)
            for place, (option, first) in enumerate(zip(knob.options, screened, strict=True))
        ]
        if kept:
            env |= knob.options[best]
    if not env:
        found.default = found.default or trials([{}], SCREENED)[0]
        return found
    found.setting, found.default = trials([env, {}], PAIRS)
    found.final = compare(found.setting, found.default)
    if found.final.holds(effect):
        found.env = env
    return found


def compare(setting: Sequence[Trial], default: Sequence[Trial]) -> Comparison:
    """Compare pairs of trials by the mean logarithm of the times of the cells that all trials have.

    A setting that fails once has no gain. A failed trial of the default is slower than every trial.
    """
    count = len(setting)
    problem = next((trial.problem for trial in setting if trial.problem), None)
    if problem:
        return Comparison(-1.0, 0, count, problem)
    working = [trial for trial in default if not trial.problem]
    cells = _common([*setting, *working])
    if not cells:
        return Comparison(-1.0, 0, count, "no cell was measured in all trials")
    gains = [
        math.inf if theirs.problem else _score(theirs, cells) - _score(ours, cells)
        for ours, theirs in zip(setting, default, strict=True)
    ]
    return Comparison(math.expm1(statistics.median(gains)), sum(gain > 0 for gain in gains), count)


def words(env: Env) -> str:
    """Return the variables as ``NAME=value NAME=value``, or ``default``."""
    return " ".join(f"{name}={value}" for name, value in env.items()) or "default"


def _common(trials: Sequence[Trial]) -> list[Cell]:
    return sorted(set.intersection(*(set(trial.timings) for trial in trials)))


def _score(trial: Trial, cells: Sequence[Cell]) -> float:
    return statistics.fmean(math.log(trial.timings[cell].seconds) for cell in cells)


def finding_lines(found: Found) -> list[str]:
    """Return the result as lines: the variables to set, or the default; then the tried settings."""
    lines = [_tried_line(one) for one in found.tried]
    if not found.env:
        why = ""
        if found.final is not None:
            why = f": the settings together are not faster than the default ({_figures(found.final)} pairs)"
        return [*lines, "", f"keep the defaults{why or ': no setting is faster in fresh trials'}"]
    assert found.final is not None
    lines += ["", f"set {words(found.env)}: {_figures(found.final)} pairs"]
    return [*lines, _order_line(found.env)]


def as_yaml(found: Found, about: str) -> str:
    """Return ``job.env`` as a part of a config, with the evidence as comments."""
    lines = [f"# hpcrun nccl tune: {about}"]
    lines += [f"# {line}" for line in finding_lines(found) if line]
    if not found.env:
        return "\n".join([*lines, "job:", "  env: {}", ""])
    lines += [f"# {one.knob.name}: {page_of(one.knob)}" for one in found.tried if one.kept]
    lines += ["job:", "  env:"]
    return "\n".join(
        [*lines, *(f"    {key}: {json.dumps(value)}" for key, value in found.env.items()), ""]
    )


def as_data(found: Found, ranks: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything as plain data: times in seconds, rates in bytes per second."""
    return {
        **about,
        "env": found.env,
        "changes_order": changes_order(found.env),
        "final": _record(found.final),
        "tried": [
            {
                "knob": one.knob.name,
                "env": dict(one.option),
                "screened": _record(one.screened),
                "confirmed": _record(one.confirmed),
                "kept": one.kept,
                "order": one.knob.order,
                "source": page_of(one.knob),
            }
            for one in found.tried
        ],
        "default": _trials(found.default, ranks),
        "setting": _trials(found.setting, ranks),
    }


def _trials(trials: Sequence[Trial], ranks: int) -> list[dict[str, Any]]:
    return [
        {
            "problem": trial.problem,
            "cells": [
                {
                    "collective": cell.collective,
                    "size": cell.size,
                    "seconds": timing.seconds,
                    "algbw": cell.size / timing.seconds,
                    "busbw": cell.size / timing.seconds * bus_factor(cell.collective, ranks),
                    "wrong": timing.wrong,
                }
                for cell, timing in sorted(trial.timings.items())
            ],
        }
        for trial in trials
    ]


def _tried_line(one: TriedOption) -> str:
    shown = one.confirmed or one.screened
    stage = "fresh pairs" if one.confirmed else "first pairs"
    mark = "kept" if one.kept else "not kept"
    order = "; changes the order of addition" if one.knob.order else ""
    return f"{words(one.option)}: {_figures(shown)} {stage}; {mark}{order}"


def _figures(shown: Comparison) -> str:
    if shown.problem:
        return f"does not work ({shown.problem}) in {shown.pairs}"
    gain = "works, where the default does not"
    if not math.isinf(shown.gain):
        gain = f"{abs(shown.gain):.0%} {'faster' if shown.gain >= 0 else 'slower'}"
    return f"{gain}, faster in {shown.faster} of {shown.pairs}"


def _order_line(env: Env) -> str:
    changing = changes_order(env)
    if not changing:
        return "the order of addition stays, so results stay bit-identical"
    return (
        f"{', '.join(changing)}: can change the order of addition and so the last bits of "
        "sums; --deterministic excludes such settings"
    )


def _record(one: Comparison | None) -> dict[str, Any] | None:
    return None if one is None else {**vars(one)}
