"""Trials over real links: the faster interface is found, and equal links change nothing."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpcrun.errors import NetworkError
from hpcrun.network.tune.search import Cell, Found, knobs_for, search
from hpcrun.network.tune.trials import Grid, TrialRanks, here, srun_command
from tests import jobs

from .links import LINKS, two_hosts

ALL = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "alltoall", "sendrecv")
SHORT = Grid("gloo", ["all_reduce"], [1 << 18, 1 << 20], seconds=0.1, patience=jobs.PATIENCE)


def tuned(rates: tuple[str | None, str | None], seed: int = 0) -> Found:
    with two_hosts(rates) as hosts, TrialRanks(here(2, hosts), 2) as crew:
        assert crew.site.interfaces == LINKS
        return search(
            lambda env: crew.trial(env, SHORT),
            knobs_for("gloo", crew.site, {}),
            lambda _: None,
            seed=seed,
        )


@pytest.fixture(scope="module")
def crew() -> Iterator[TrialRanks]:
    """Two ranks of this machine."""
    with TrialRanks(here(2), 2) as crew:
        yield crew


def test_every_collective_is_measured_and_right(crew: TrialRanks) -> None:
    trial = crew.trial({}, replace(SHORT, collectives=ALL, sizes=[8, 4096], seconds=0.01))
    assert trial.problem is None
    assert {cell.collective for cell in trial.timings} >= set(ALL) - {"reduce_scatter"}
    assert {cell.size for cell in trial.timings} == {8, 4096}
    assert all(seconds > 0 for seconds in trial.timings.values())


def test_a_setting_that_fails_is_reported(crew: TrialRanks) -> None:
    trial = crew.trial({"GLOO_SOCKET_IFNAME": "nothing0"}, SHORT)
    assert "nothing0" in str(trial.problem)
    assert trial.timings == {}
    # The setting of a trial does not affect the next trial.
    assert crew.trial({}, SHORT).problem is None


def test_a_missing_backend_and_a_slow_trial_are_reported(
    crew: TrialRanks,
) -> None:
    trial = crew.trial({}, replace(SHORT, backend="nothing"))
    assert "nothing" in str(trial.problem)
    trial = crew.trial({}, replace(SHORT, patience=0.001))
    assert str(trial.problem).startswith("no end in 0 s")
    assert crew.trial({}, SHORT).problem is None


def test_ranks_that_do_not_start_are_reported() -> None:
    with pytest.raises(NetworkError, match="0 of 2 ranks started"):
        TrialRanks(here(2, [["false"], ["false"]]), 2)


def test_the_step_of_srun_has_a_rank_for_each_gpu() -> None:
    words = srun_command(["n1", "n2"], 4)
    assert words[:7] == ["srun", "--nodes", "2", "--ntasks", "8", "--ntasks-per-node", "4"]
    assert words[-3:] == [words[-3], "-m", "hpcrun.network.tune.worker"]


@pytest.mark.slow
def test_the_faster_of_two_links_is_found() -> None:
    # Each host's name is on the slow link, which gloo uses.
    found = tuned(("40mbit", None))
    assert found.env == {"GLOO_SOCKET_IFNAME": "link1"}
    assert found.final is not None
    assert found.final.gain > 0.5
    assert Cell("all_reduce", 1 << 20) in found.setting[0].timings


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_two_equal_links_change_nothing(seed: int) -> None:
    assert tuned(("200mbit", "200mbit"), seed).env == {}
