"""Trials over real links: the faster interface is found, and equal links change nothing."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from hpcrun.errors import NetworkError
from hpcrun.network.agents import AGENT, Processes, here, start
from hpcrun.network.tune import COLLECTIVES, Cell, Found, Grid, TuneNodes, knobs_for, search
from tests.support import jobs

from .two_hosts import HOSTS, LINKS, two_hosts

SHORT = Grid("gloo", ["all_reduce"], [1 << 18, 1 << 20], seconds=0.1, patience=jobs.PATIENCE)


def tuned(rates: tuple[str | None, str | None], seed: int = 0) -> Found:
    with two_hosts(rates) as prefixes:

        def begin(names: Sequence[str]) -> Processes:
            return Processes(
                [
                    ([*prefix, sys.executable, *AGENT], os.environ | {"HPCRUN_CHECK_NAME": name})
                    for name, prefix in zip(names, prefixes, strict=True)
                ]
            )

        nodes = start(begin, HOSTS, jobs.PATIENCE)
        try:
            crew = TuneNodes(nodes, 1)
            assert crew.site.interfaces == LINKS
            knobs = knobs_for("gloo", crew.site, {})
            return search(lambda env: crew.trial(env, SHORT), knobs, lambda _: None, seed=seed)
        finally:
            nodes.close()


@pytest.fixture(scope="module")
def crew() -> Iterator[TuneNodes]:
    """Two ranks of this machine."""
    nodes = start(here, ["127.0.0.1"], jobs.PATIENCE)
    yield TuneNodes(nodes, 2)
    nodes.close()


def test_every_collective_is_measured_and_right(crew: TuneNodes) -> None:
    trial = crew.trial({}, replace(SHORT, collectives=COLLECTIVES, sizes=[8, 4096], seconds=0.01))
    assert trial.problem is None
    assert {cell.collective for cell in trial.timings} >= {"all_reduce", "all_gather"}
    assert {cell.size for cell in trial.timings} == {8, 4096}
    assert all(seconds > 0 for seconds in trial.timings.values())


@pytest.mark.parametrize(
    ("env", "grid", "problem"),
    [
        ({"GLOO_SOCKET_IFNAME": "nothing0"}, SHORT, "nothing0"),
        pytest.param({}, replace(SHORT, backend="nothing"), "nothing", marks=pytest.mark.slow),
        pytest.param({}, replace(SHORT, patience=0.001), "no end in time", marks=pytest.mark.slow),
    ],
)
def test_a_setting_that_fails_affects_no_later_trial(
    crew: TuneNodes, env: dict[str, str], grid: Grid, problem: str
) -> None:
    trial = crew.trial(env, grid)
    assert problem in str(trial.problem)
    assert trial.timings == {}
    assert crew.trial({}, SHORT).problem is None


def test_nodes_that_do_not_start_are_reported() -> None:
    nodes = start(lambda _: Processes([(["false"], os.environ)]), ["a", "b"], jobs.PATIENCE)
    with pytest.raises(NetworkError, match="2 of 2 nodes did not start"):
        TuneNodes(nodes, 1)


@pytest.mark.slow
def test_the_faster_of_two_links_is_found() -> None:
    # Each host's name is on the slow link, which gloo uses.
    found = tuned(("40mbit", None))
    assert found.env == {"GLOO_SOCKET_IFNAME": "link1"}
    assert found.final is not None
    assert found.final.gain > 0.5
    assert Cell("all_reduce", 1 << 20) in found.default[0].timings


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_two_equal_links_change_nothing(seed: int) -> None:
    assert tuned(("200mbit", "200mbit"), seed).env == {}
