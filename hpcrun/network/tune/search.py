"""A search over the knobs that keeps the default unless a setting is faster in almost every pair of trials.

A trial is one observation, independent of its number of calls: the calls of one process group are not
independent. A few trials of each option select the option that looks faster. This choice exaggerates the
gain, so fresh pairs of trials decide: one of the option and one of the present setting, in random order. At
the end, fresh pairs compare the whole setting with the default. A sign test on 9 pairs with at most one
slower pair has p = 10 / 512.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcrun.network.tune.knobs import Cell, Env, Knob, Trial

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


def cell_gains(setting: Sequence[Trial], default: Sequence[Trial]) -> Mapping[Cell, float]:
    """Return the gain in each cell, between the medians of the trials."""
    working = [trial for trial in default if not trial.problem]
    cells = _common([*setting, *working]) if working else ()
    return {cell: median_time(working, cell) / median_time(setting, cell) - 1 for cell in cells}


def median_time(trials: Sequence[Trial], cell: Cell) -> float:
    """Return the median over the trials of the seconds of a cell."""
    return statistics.median(trial.timings[cell].seconds for trial in trials)


def words(env: Env) -> str:
    """Return the variables as ``NAME=value NAME=value``, or ``default``."""
    return " ".join(f"{name}={value}" for name, value in env.items()) or "default"


def _common(trials: Sequence[Trial]) -> list[Cell]:
    return sorted(set.intersection(*(set(trial.timings) for trial in trials)))


def _score(trial: Trial, cells: Sequence[Cell]) -> float:
    return statistics.fmean(math.log(trial.timings[cell].seconds) for cell in cells)
