"""Statistics against scipy, on random tables, and against numbers of earlier versions of hpcrun."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hpcrun.results.statistics import compare, compare_all, describe, holm

EXACT = pytest.approx
TABLES = st.tuples(
    st.integers(0, 2**32), st.integers(2, 12), st.integers(2, 12), st.floats(1e-6, 1e6)
)


def by_seed(values: np.ndarray, first: int = 0) -> dict[str, float]:
    return {str(seed): float(value) for seed, value in enumerate(values, first)}


@given(TABLES)
@settings(max_examples=20, deadline=None)
def test_mean_interval_std_and_median_are_those_of_scipy(
    table: tuple[int, int, int, float],
) -> None:
    seed, n, _, scale = table
    values = np.random.default_rng(seed).normal(size=n) * scale
    found = describe(values.tolist())
    low, high = stats.t.interval(0.95, n - 1, loc=np.mean(values), scale=stats.sem(values))
    # An end of the interval may be near zero.
    assert found.mean.low == EXACT(low, rel=1e-12, abs=1e-12 * scale)
    assert found.mean.high == EXACT(high, rel=1e-12, abs=1e-12 * scale)
    assert found.std == EXACT(stats.tstd(values), rel=1e-12)
    assert (found.n, found.median) == (n, EXACT(stats.scoreatpercentile(values, 50), rel=1e-12))


@given(TABLES)
@settings(max_examples=20, deadline=None)
def test_tests_are_those_of_scipy(table: tuple[int, int, int, float]) -> None:
    seed, n, m, scale = table
    draw = np.random.default_rng(seed)
    a, b = draw.normal(size=n) * scale, 1 + draw.normal(size=m)
    # No seed is in both.
    welch, paired = compare(by_seed(a), by_seed(b, 100)), compare(by_seed(a), by_seed(b + a[0]))
    size = min(n, m)
    for found, asked, effect in (
        (
            welch,
            stats.ttest_ind(b, a, equal_var=False),
            (b.mean() - a.mean()) / np.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2),
        ),
        (
            paired,
            stats.ttest_rel((b + a[0])[:size], a[:size]),
            ((b + a[0])[:size] - a[:size]).mean() / ((b + a[0])[:size] - a[:size]).std(ddof=1),
        ),
    ):
        interval = asked.confidence_interval(0.95)
        # The rounding of a difference is relative to the values, and that of p to its exponent.
        absolute = 1e-12 * max(np.abs(a).max(), np.abs(b + a[0]).max())
        assert found.p == EXACT(asked.pvalue, rel=1e-9)
        assert found.effect == EXACT(effect, rel=1e-9)
        assert found.difference.low == EXACT(interval.low, rel=1e-12, abs=absolute)
        assert found.difference.high == EXACT(interval.high, rel=1e-12, abs=absolute)
    assert welch.sizes == (n, m)
    assert (welch.wins, paired.sizes) == (None, (size, size))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_holm_is_the_closed_test_of_bonferroni(p: list[float]) -> None:
    # Marcus, Peritz and Gabriel 1976: a hypothesis is rejected if all sets that contain it are rejected.
    every = [c for size in range(1, len(p) + 1) for c in combinations(range(len(p)), size)]
    expected = [
        min(1.0, max(len(c) * min(p[other] for other in c) for c in every if at in c))
        for at in range(len(p))
    ]
    assert holm(p) == EXACT(expected)


def test_the_best_of_equal_configs_seldom_differs() -> None:
    draw, wrong = np.random.default_rng(1), {None: 0, 0: 0}
    for _ in range(200):
        groups = [by_seed(row, 100 * at) for at, row in enumerate(draw.normal(size=(10, 30)))]
        groups.sort(key=lambda group: float(np.mean([*group.values()])))
        for base in wrong:
            found, tests = compare_all(groups, base)
            assert tests == (45 if base is None else 9)
            wrong[base] += any(one is not None and (one.corrected or 1) < 0.05 for one in found)
    # 5% are 10 of 200. A correction for the nine tests of the table does not suffice.
    assert wrong[None] <= 10 < wrong[0]


def test_empty_configs_and_single_runs_are_no_tests() -> None:
    groups = [{"0": 1.0, "1": 1.1}, {"0": 1.4, "1": 1.6}, {"2": 9.0}, {}]
    found, tests = compare_all(groups)
    assert [one is None for one in found] == [True, False, False, True]
    assert tests == 1
    assert found[1] is not None
    assert found[1].corrected == found[1].p
    assert found[2] is not None
    assert (found[2].sizes, found[2].difference.value) == ((2, 1), EXACT(7.95))
    assert (found[2].difference.low, found[2].p, found[2].corrected) == (None, None, None)
    assert compare_all([{}, {}]) == ([None, None], 0)
    assert [one is None for one in compare_all([{}, *groups])[0]] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_a_base_of_ones_own_counts_its_tests_only() -> None:
    draw = np.random.default_rng(3)
    groups = [by_seed(draw.normal(size=4) + at) for at in range(4)]
    assert [compare_all(groups, base)[1] for base in (None, 0, 3)] == [6, 3, 3]
    assert compare_all(groups, 3)[0][3] is None


def test_few_common_seeds_are_no_pairs() -> None:
    first = by_seed(np.arange(6.0))
    assert compare(first, by_seed(np.arange(6.0) ** 2, 3)).sizes == (3, 3)
    assert compare(first, by_seed(np.arange(6.0) ** 2, 4)).sizes == (6, 6)


def test_one_value_has_no_interval() -> None:
    found = describe([3.0])
    assert (found.n, found.mean.value, found.median) == (1, 3.0, 3.0)
    assert (found.std, found.mean.low) == (None, None)


def test_a_paired_comparison() -> None:
    found = compare(by_seed(np.array([1.0, 2, 3, 4])), by_seed(np.array([0.8, 1.9, 3.0, 3.5])))
    # t = -1.851640, p = 0.161162.
    assert found.p == EXACT(0.1611618472, rel=1e-8)
    assert found.effect == EXACT(-1.8516401995 / 2, rel=1e-6)
    assert (found.sizes, found.wins) == ((4, 4), 3)
    assert compare({"0": 1.0, "1": 2.0}, {"0": 3.0, "1": 2.0}, lower=False).wins == 1


def test_equal_differences_have_no_effect_size() -> None:
    found = compare(by_seed(np.array([0.1, 0.2, 0.3])), by_seed(np.array([0.4, 0.5, 0.6])))
    assert (found.effect, found.p) == (None, None)
    found = compare({"0": 0.1, "1": 0.1}, {"2": 0.3, "3": 0.3})
    assert (found.effect, found.p, found.difference.value) == (None, None, EXACT(0.2))
