"""Statistics against scipy and against numbers of earlier versions of hpcrun."""

import numpy as np
import pytest
from scipy import stats

from hpcrun.results.statistics import compare_paired, describe, mean_interval


@pytest.mark.parametrize("n", [2, 3, 5, 8, 30])
def test_intervals_and_tests_are_those_of_scipy(n: int) -> None:
    draw = np.random.default_rng(n)
    a, b = draw.normal(size=n), draw.normal(size=n)
    low, high = stats.t.interval(0.95, n - 1, loc=a.mean(), scale=stats.sem(a))
    found = mean_interval(a)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    paired = compare_paired(a.tolist(), b.tolist())
    assert paired.p == pytest.approx(stats.ttest_rel(b, a).pvalue)


def test_one_value_has_no_interval() -> None:
    found = describe([3.0])
    assert (found.n, found.mean.value, found.median) == (1, 3.0, 3.0)
    assert (found.std, found.mean.low) == (None, None)
    assert compare_paired([1.0], [2.0]).p is None


def test_a_paired_comparison() -> None:
    found = compare_paired([1.0, 2.0, 3.0, 4.0], [0.8, 1.9, 3.0, 3.5])
    # t = -1.851640, p = 0.161162.
    assert found.p == pytest.approx(0.1611618472, rel=1e-8)
    assert found.effect == pytest.approx(-1.8516401995 / 2, rel=1e-6)
    assert (found.n, found.wins, found.ties) == (4, 3, 1)
    assert compare_paired([1.0, 2.0], [3.0, 2.0], lower_is_better=False).wins == 1


def test_equal_differences_have_no_effect_size() -> None:
    found = compare_paired([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert (found.effect, found.p) == (None, None)
    assert compare_paired([1.0, 2.0], [1.0, 2.0]).ties == 2
