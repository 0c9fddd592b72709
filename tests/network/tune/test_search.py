"""Pure noise changes nothing, and a real gain is found: 200 seeds of noisy trials."""

import itertools
import math
import random
from collections.abc import Mapping

import pytest

from hpcrun.network.tune.search import Cell, Knob, Timing, Trial, compare, search

CELLS = [Cell("all_reduce", 8), Cell("all_reduce", 1 << 20), Cell("alltoall", 1 << 20)]
KNOBS = [
    Knob("first", "", tuple({"A": str(value)} for value in range(4)), order=False, source="env"),
    Knob("second", "", ({"B": "1"}, {"B": "2"}), order=True, source="env"),
]


class Network:
    """Return trials with noisy times as on a shared machine: drift, spread, and occasional outliers."""

    def __init__(self, seed: int, factors: Mapping[str, float]) -> None:
        self.random, self.factors, self.count, self.phase = random.Random(seed), factors, 0, seed

    def trial(self, env: Mapping[str, str]) -> Trial:
        self.count += 1
        factor = math.prod(self.factors.get(f"{key}={value}", 1.0) for key, value in env.items())
        drift = 1 + 0.1 * math.sin(self.phase + self.count / 15)
        luck = self.random.lognormvariate(0, 0.04)
        luck *= 3 if self.random.random() < 0.03 else 1
        return Trial(
            {
                cell: Timing(
                    1e-5 * (1 + cell.size / 1e4) * factor * drift * luck
                    * self.random.lognormvariate(0, 0.05)
                )
                for cell in CELLS
            }
        )  # fmt: skip


def found_env(seed: int, factors: Mapping[str, float]) -> dict[str, str]:
    return search(Network(seed, factors).trial, KNOBS, lambda _: None, seed=seed).env


def test_on_an_even_field_the_default_stays() -> None:
    assert [found_env(seed, {}) for seed in range(200)] == [{}] * 200


def test_a_gain_below_the_smallest_effect_changes_nothing() -> None:
    changed = sum(bool(found_env(seed, {"A=2": 0.98})) for seed in range(200))
    assert changed <= 2


def test_a_planted_setting_is_found() -> None:
    envs = [found_env(seed, {"A=2": 0.7, "A=1": 0.9, "B=1": 1.2}) for seed in range(200)]
    assert sum(env.get("A") == "2" for env in envs) > 180
    assert not any("B" in env for env in envs)


def test_settings_of_two_knobs_are_found_together() -> None:
    envs = [found_env(seed, {"A=3": 0.7, "B=2": 0.7}) for seed in range(50)]
    assert sum(env == {"A": "3", "B": "2"} for env in envs) > 40


def test_a_setting_that_fails_once_is_not_chosen() -> None:
    network, broken = Network(0, {"A=2": 0.5}), itertools.count()

    def measure(env: Mapping[str, str]) -> Trial:
        if env.get("A") == "2" and next(broken) == 5:
            return Trial(problem="wrong results of all_reduce with 8 bytes")
        return network.trial(env)

    found = search(measure, KNOBS, lambda _: None)
    assert found.env == {}
    (two,) = [one for one in found.tried if one.option == {"A": "2"}]
    assert two.confirmed is not None
    assert two.confirmed.problem == "wrong results of all_reduce with 8 bytes"


def test_where_the_default_fails_a_setting_is_found() -> None:
    network = Network(0, {})

    def measure(env: Mapping[str, str]) -> Trial:
        return network.trial(env) if env.get("A") == "1" else Trial(problem="no route to host")

    assert search(measure, KNOBS, lambda _: None).env == {"A": "1"}


def test_cells_that_a_slow_trial_omitted_do_not_count() -> None:
    fast = Trial({cell: Timing(1.0) for cell in CELLS})
    slow = Trial({cell: Timing(2.0) for cell in CELLS[:2]})
    assert compare([fast] * 4, [slow] * 4).gain == pytest.approx(1.0)
