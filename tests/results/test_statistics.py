"""Statistics against the numbers of scipy and of rliable's definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrun.results.statistics import (
    compare_paired,
    describe,
    iqm,
    iqm_interval,
    mean_interval,
    t_quantile,
    t_tail,
)

# scipy.stats.t.ppf, scipy 1.17.1.
QUANTILES = [
    (0.975, 1, 12.706204736174694),
    (0.975, 2, 4.302652729749462),
    (0.975, 4, 2.7764451051977934),
    (0.95, 9, 1.833112932656237),
    (0.995, 30, 2.7499956535672254),
    (0.975, 1000, 1.9623390808264083),
    (0.9, 0.5, 10.27032441023451),
]


@pytest.mark.parametrize(("probability", "freedom", "value"), QUANTILES)
def test_quantiles_are_those_of_scipy(probability: float, freedom: float, value: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(value, rel=1e-10)
    assert t_quantile(1 - probability, freedom) == pytest.approx(-value, rel=1e-10)


@given(st.floats(0.001, 0.999), st.floats(0.5, 500))
def test_the_quantile_inverts_the_tail(probability: float, freedom: float) -> None:
    assert t_tail(t_quantile(probability, freedom), freedom) == pytest.approx(1 - probability)


@pytest.mark.parametrize(("probability", "freedom"), [(0, 3), (1, 3), (0.5, 0), (math.nan, 2)])
def test_no_quantile_outside_of_the_definition(probability: float, freedom: float) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(probability, freedom)


def test_everything_of_scipy_where_it_is_installed() -> None:
    scipy = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(1)
    for n in (2, 3, 5, 8, 30):
        a, b = draw.normal(size=n), draw.normal(size=n)
        low, high = scipy.t.interval(0.95, n - 1, loc=a.mean(), scale=scipy.sem(a))
        found = mean_interval(a)
        assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
        paired = compare_paired(a.tolist(), b.tolist())
        assert paired.p == pytest.approx(scipy.ttest_rel(b, a).pvalue)
        # rliable.metrics.aggregate_iqm of rliable 1.2 is this call.
        assert iqm(a) == pytest.approx(scipy.trim_mean(a, proportiontocut=0.25, axis=None))


def test_the_interquartile_mean_drops_a_quarter_on_each_side() -> None:
    assert iqm(np.array([1.0, 2.0, 3.0, 100.0])) == 2.5
    assert iqm(np.array([9.0, 1.0, 5.0])) == 5.0
    assert iqm(np.arange(8.0)) == 3.5


def test_the_bootstrap_is_seeded_and_near_the_truth() -> None:
    values = np.random.default_rng(2).normal(size=40)
    one, other = iqm_interval(values, seed=3), iqm_interval(values, seed=3)
    assert one == other
    assert one.low is not None
    assert one.high is not None
    assert one.low < one.value < one.high
    # The interquartile mean of 40 normal values has a standard error of about 0.17.
    assert 0.4 < one.high - one.low < 1.1


def test_fewer_than_eight_values_have_no_bootstrap_interval() -> None:
    values = np.random.default_rng(2).normal(size=8)
    assert iqm_interval(values).low is not None
    assert iqm_interval(values[:7]).low is None


def test_one_value_has_no_interval() -> None:
    found = describe([3.0])
    assert (found.n, found.mean.value, found.median, found.iqm.value) == (1, 3.0, 3.0, 3.0)
    assert (found.std, found.mean.low, found.iqm.high) == (None, None, None)
    assert compare_paired([1.0], [2.0]).p is None


def test_a_paired_comparison() -> None:
    found = compare_paired([1.0, 2.0, 3.0, 4.0], [0.8, 1.9, 3.0, 3.5])
    # scipy.stats.ttest_rel([0.8, 1.9, 3.0, 3.5], [1.0, 2.0, 3.0, 4.0]): t = -1.851640, p = 0.161162.
    assert found.p == pytest.approx(0.1611618472, rel=1e-8)
    assert found.effect == pytest.approx(-1.8516401995 / 2, rel=1e-6)
    assert (found.n, found.wins, found.ties) == (4, 3, 1)
    assert compare_paired([1.0, 2.0], [3.0, 2.0], lower_is_better=False).wins == 1


def test_equal_differences_have_no_effect_size() -> None:
    found = compare_paired([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert (found.effect, found.p) == (None, None)
    assert compare_paired([1.0, 2.0], [1.0, 2.0]).ties == 2
