"""Coordinate descent over the knobs, which keeps the default unless a setting is significantly faster.

A few trials of each option of a knob select the options that look faster. This choice exaggerates their gain,
so fresh trials, alternating with trials of the present setting, decide. At the end, fresh trials compare the
whole setting with the default again.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcrun.network.tune.cells import Trial
from hpcrun.network.tune.decision import (
    ALPHA,
    MIN_EFFECT,
    Comparison,
    compare,
    holm,
    repeats_for,
)
from hpcrun.network.tune.knobs import Env, Knob

Measure = Callable[[Env], Trial]
Progress = Callable[[str], None]
_CONFIRMED_AT_MOST = 3


@dataclass(frozen=True)
class SearchPlan:
    """The rules of a search. ``screen``: first trials of each option. ``seed``: of the order of the trials.

    ``alpha``: the probability of a wrong change, for the whole search.
    """

    screen: int = 3
    effect: float = MIN_EFFECT
    alpha: float = ALPHA
    seed: int = 0

    def level(self, knobs: int) -> float:
        """Return the level of the tests of one knob of several."""
        return self.alpha / max(1, knobs)

    def repeats(self, knobs: int) -> int:
        """Return the number of fresh trials of each side."""
        return repeats_for(self.level(knobs) / _CONFIRMED_AT_MOST)


@dataclass(frozen=True)
class TriedOption:
    """An option of a knob. ``screened``: from the first trials; ``confirmed``: from fresh trials, if any."""

    knob: Knob
    option: Env
    screened: Comparison
    confirmed: Comparison | None = None
    corrected_p: float | None = None
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


def search(measure: Measure, knobs: Sequence[Knob], plan: SearchPlan, progress: Progress) -> Found:
    """Find a better setting, or none.

    Args:
        measure: runs a trial with some variables added to the default.
        progress: called with the name of the measured setting before each trial.
    """
    generator = random.Random(plan.seed)
    found = Found()
    env: dict[str, str] = {}

    def trials(settings: Mapping[str, Env], count: int) -> dict[str, list[Trial]]:
        """Measure each setting ``count`` times, in turns, each turn in another order."""
        measured: dict[str, list[Trial]] = {name: [] for name in settings}
        for _ in range(count):
            for name in generator.sample(list(settings), len(settings)):
                progress(name)
                measured[name].append(measure(settings[name]))
        return measured

    for knob in knobs:
        best = _best_of(knob, env, trials, plan, len(knobs), found)
        env |= best or {}
    if not env:
        found.default = found.default or trials({"default": {}}, plan.screen)["default"]
        return found
    measured = trials({"default": {}, "found": env}, plan.repeats(len(knobs)))
    found.default, found.setting = measured["default"], measured["found"]
    found.final = compare(found.setting, found.default)
    if found.final.holds(plan.alpha, plan.effect):
        found.env = env
    return found


def _best_of(
    knob: Knob,
    env: Env,
    trials: Callable[[Mapping[str, Env], int], dict[str, list[Trial]]],
    plan: SearchPlan,
    knobs: int,
    found: Found,
) -> Env | None:
    """Return the best option of ``knob`` in addition to ``env`` that fresh trials confirm, or None."""
    options = {words(option): option for option in knob.options}
    settings = {name: {**env, **option} for name, option in options.items()}
    so_far = words(env)
    first = trials({so_far: env, **settings}, plan.screen)
    found.default = found.default or first[so_far]
    screened = {name: compare(first[name], first[so_far]) for name in options}
    promising = sorted(
        (name for name in options if screened[name].gain >= plan.effect),
        key=lambda name: -screened[name].gain,
    )[:_CONFIRMED_AT_MOST]
    confirmed: dict[str, Comparison] = {}
    if promising:
        fresh = trials(
            {so_far: env, **{name: settings[name] for name in promising}}, plan.repeats(knobs)
        )
        confirmed = {name: compare(fresh[name], fresh[so_far]) for name in promising}
    corrected = dict(zip(promising, holm([confirmed[name].p for name in promising]), strict=True))
    level = plan.level(knobs)
    better = [
        name
        for name in promising
        if corrected[name] <= level and confirmed[name].holds(level, plan.effect)
    ]
    best = max(better, key=lambda name: confirmed[name].gain, default=None)
    found.tried += [
        TriedOption(
            knob,
            option,
            screened[name],
            confirmed.get(name),
            corrected.get(name),
            kept=name == best,
        )
        for name, option in options.items()
    ]
    return None if best is None else options[best]


def words(env: Env) -> str:
    """Return the variables as ``NAME=value NAME=value``, or ``default``."""
    return " ".join(f"{name}={value}" for name, value in env.items()) or "default"
