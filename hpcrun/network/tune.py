"""A search over settings of NCCL and gloo, which keeps the default unless an option is clearly faster.

A trial runs the collectives in new processes on the nodes of a check (:class:`hpcrun.network.agents.Nodes`).

A trial is one observation, independent of its number of calls: the calls of one process group are not
independent. A few trials of each option select the option that looks fastest. This choice exaggerates the
gain, so fresh pairs of trials decide: one of the option and one of the default, in random order. A sign test
on 12 pairs with at most one slower pair has p = 13 / 4096.
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
from hpcrun.network.agents import Nodes
from hpcrun.network.nccl.rules import version_key
from hpcrun.network.torch_child import IMPORT

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


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
"""What DDP and FSDP call."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_MAX = 64 << 30


@dataclass(frozen=True, order=True)
class Cell:
    """A collective with a size in bytes: of the whole array, as in nccl-tests."""

    collective: str
    size: int


@dataclass(frozen=True)
class Trial:
    """The times of one fresh process group: seconds of a call on the slowest rank, the lower quartile.

    ``problem``: the reason if there are no times.
    """

    timings: Mapping[Cell, float] = field(default_factory=dict)
    problem: str | None = None


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


def _bytes(text: str) -> int:
    number = text.upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in ("K", "M", "G") else ""
    return int(number.removesuffix(unit)) * _UNITS[unit]


@dataclass(frozen=True)
class Grid:
    """The measurements of a trial.

    ``seconds``: approximate time for each cell. ``patience``: seconds for the collectives of a trial.
    """

    backend: str
    collectives: Sequence[str]
    sizes: Sequence[int]
    seconds: float = 0.2
    patience: float = 300.0


# Seconds: a size is skipped if one call would take longer.
_LONGEST = 2.0
# Seconds for the agents to end the ranks of a trial.
_STOPPING = 30.0


class TuneNodes:
    """The nodes of a search, with ``count`` ranks on each. The name of a node leads to it.

    Raises:
        NetworkError: a node has not started, or does not answer.
    """

    def __init__(self, nodes: Nodes, count: int) -> None:
        self._nodes, self._names, self._count = nodes, [*nodes.live], count
        self.ranks = len(self._names) * count
        if nodes.silent:
            words = (
                f"{len(nodes.silent)} of {len(self._names) + len(nodes.silent)} nodes did not start"
            )
            raise NetworkError(f"{words}: {self._words()}")
        facts = list(self._ask("site", _STOPPING).values())
        ready = list(self._ask("prepare", IMPORT + _STOPPING, count=1).values())
        self.site = Site(
            nodes=len(facts),
            ranks=self.ranks,
            interfaces=tuple(sorted(set.intersection(*(set(one["interfaces"]) for one in facts)))),
            rdma=all(one["rdma"] for one in facts),
            version=ready[0].get("versions", {}).get("nccl"),
        )

    def trial(self, env: Env, grid: Grid) -> Trial:
        """Measure ``grid`` with the variables ``env`` set in addition to the environment."""
        ready = self._ask("prepare", IMPORT + _STOPPING, count=self._count, env=dict(env))
        if problem := self._problem(ready, "here"):
            return Trial(problem=problem)
        first = self._names[0]
        order = {
            "members": {
                name: (number * self._count, self._count) for number, name in enumerate(self._names)
            },
            "ranks": self.ranks,
            "address": first,
            "peers": [self._names[-1], first],
            "port": ready[first]["port"],
            "limit": grid.patience,
            "longest": _LONGEST,
            **{name: value for name, value in vars(grid).items() if name != "patience"},
        }
        answers = self._ask("measure", grid.patience + _STOPPING, groups=[order])
        if problem := self._problem(answers, "done"):
            return Trial(problem=problem)
        timings = {Cell(name, size): seconds for name, size, seconds in answers[first]["cells"]}
        return Trial(timings) if timings else Trial(problem="no collective was measured")

    def _ask(self, what: str, seconds: float, **arguments: Any) -> dict[str, Any]:
        answers = self._nodes.ask(what, seconds, **arguments)
        if missing := [name for name in self._names if name not in answers]:
            raise NetworkError(f"{missing[0]} does not answer: {self._words()}")
        return answers

    def _problem(self, answers: Mapping[str, dict[str, Any]], stage: str) -> str | None:
        bad = [(name, one) for name, one in answers.items() if one["stage"] != stage]
        if not bad:
            return None
        # A failed rank explains more than the ranks that wait for it.
        name, one = min(bad, key=lambda item: "problem" not in item[1])
        return f"{name}: {one.get('problem', 'no end in time')}"

    def _words(self) -> str:
        return " ".join(self._nodes.words().split())[-300:] or "no answer"


Measure = Callable[[Env], Trial]
Progress = Callable[[str], None]

SCREENED = 3
PAIRS = 12
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

    @property
    def holds(self) -> bool:
        """True if the gain is large enough, in almost all pairs."""
        return (
            self.problem is None
            and self.faster >= self.pairs - SLOWER_PAIRS
            and self.gain >= MIN_EFFECT
        )


@dataclass(frozen=True)
class Found:
    """The result of a search. ``knob``, ``env``: the chosen option; ``env`` is empty if the default stays.

    ``tried``: each option with its first trials. ``best``: the option that seemed fastest, if it seemed fast
    enough; ``final``: its fresh pairs. ``default``: the last trials of the default.
    """

    tried: Sequence[tuple[Knob, Env, Comparison]]
    default: Sequence[Trial]
    best: tuple[Knob, Env] | None = None
    final: Comparison | None = None

    @property
    def env(self) -> Env:
        """The variables to set; empty if the default stays."""
        return self.best[1] if self.best and self.final and self.final.holds else {}


def search(measure: Measure, knobs: Sequence[Knob], progress: Progress, *, seed: int = 0) -> Found:
    """Find the option that is faster than the default, or none.

    Args:
        measure: runs a trial with some variables added to the default.
        progress: called with the name of the measured setting before each trial.
        seed: of the order of the trials.
    """
    generator = random.Random(seed)

    def trials(settings: Sequence[Env], count: int) -> list[list[Trial]]:
        """Measure each setting ``count`` times, in turns, each turn in another order."""
        measured: list[list[Trial]] = [[] for _ in settings]
        for _ in range(count):
            for place in generator.sample(range(len(settings)), len(settings)):
                progress(words(settings[place]))
                measured[place].append(measure(settings[place]))
        return measured

    options = [(knob, option) for knob in knobs for option in knob.options]
    default, *others = trials([{}, *(option for _, option in options)], SCREENED)
    tried = [
        (knob, option, compare(other, default))
        for (knob, option), other in zip(options, others, strict=True)
    ]
    knob, option, seen = max(tried, key=lambda one: one[2].gain, default=(None, {}, None))
    if knob is None or seen is None or seen.gain < MIN_EFFECT:
        return Found(tried, default)
    setting, default = trials([option, {}], PAIRS)
    return Found(tried, default, (knob, option), compare(setting, default))


def compare(setting: Sequence[Trial], default: Sequence[Trial]) -> Comparison:
    """Compare pairs of trials by the mean logarithm of the times of the cells that all trials have.

    A setting that fails once has no gain. A failed trial of the default is slower than every trial.
    """
    count = len(setting)
    problem = next((trial.problem for trial in setting if trial.problem), None)
    if problem:
        return Comparison(-1.0, 0, count, problem)
    working = [trial for trial in default if not trial.problem]
    cells = sorted(set.intersection(*(set(trial.timings) for trial in [*setting, *working])))
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


def _score(trial: Trial, cells: Sequence[Cell]) -> float:
    return statistics.fmean(math.log(trial.timings[cell]) for cell in cells)


def finding_lines(found: Found) -> list[str]:
    """Return the result as lines: the tried options, then ``job.env`` for a config, or the default."""
    lines = [
        f"{words(option)}: {_figures(seen)} first pairs"
        + ("; changes the order of addition" if knob.order else "")
        for knob, option, seen in found.tried
    ]
    if found.best is None or found.final is None:
        return [*lines, "", "keep the defaults: no setting is faster"]
    knob, option = found.best
    evidence = f"{words(option)}: {_figures(found.final)} fresh pairs"
    if not found.env:
        return [*lines, "", f"keep the defaults: not confirmed: {evidence}"]
    order = "the order of addition stays, so results stay bit-identical"
    if knob.order:
        order = (
            "it can change the order of addition and so the last bits of sums; --deterministic excludes "
            "such settings"
        )
    settings = [f"    {key}: {json.dumps(value)}" for key, value in found.env.items()]
    source = f"# {knob.name}: {page_of(knob)}"
    return [*lines, "", f"set {evidence}", order, "", source, "job:", "  env:", *settings]


def as_data(found: Found) -> dict[str, Any]:
    """Return the chosen variables, and the comparison of each option with the default, as plain data."""
    return {
        "env": dict(found.env),
        "changes_order": found.best is not None and bool(found.env) and found.best[0].order,
        "final": found.final and vars(found.final),
        "tried": [
            {"knob": knob.name, "env": dict(option), "order": knob.order, **vars(seen)}
            for knob, option, seen in found.tried
        ],
    }


def _figures(shown: Comparison) -> str:
    if shown.problem:
        return f"does not work ({shown.problem}) in {shown.pairs}"
    gain = "works, where the default does not"
    if not math.isinf(shown.gain):
        gain = f"{abs(shown.gain):.0%} {'faster' if shown.gain >= 0 else 'slower'}"
    return f"{gain}, faster in {shown.faster} of {shown.pairs}"
