"""Pure noise changes nothing, and a real gain is found: 200 seeds of noisy trials."""

import itertools
import json
import math
import random
from collections.abc import Mapping

import pytest
import yaml

from hpcrun.errors import NetworkError
from hpcrun.network.tune import (
    Cell,
    Found,
    Knob,
    Site,
    Trial,
    as_data,
    compare,
    finding_lines,
    knobs_for,
    search,
    sizes_of,
)

CELLS = [Cell("all_gather", 8), Cell("all_reduce", 1 << 20), Cell("reduce_scatter", 1 << 20)]
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
        usual = factor * drift * luck
        return Trial(
            {
                cell: 1e-5 * (1 + cell.size / 1e4) * usual * self.random.lognormvariate(0, 0.05)
                for cell in CELLS
            }
        )


def found(seed: int, factors: Mapping[str, float]) -> Found:
    return search(Network(seed, factors).trial, KNOBS, lambda _: None, seed=seed)


def test_on_an_even_field_the_default_stays() -> None:
    assert [found(seed, {}).env for seed in range(200)] == [{}] * 200


def test_a_gain_below_the_smallest_effect_changes_nothing() -> None:
    changed = sum(bool(found(seed, {"A=2": 0.98}).env) for seed in range(200))
    assert changed <= 2


def test_a_planted_setting_is_found() -> None:
    envs = [found(seed, {"A=2": 0.7, "A=1": 0.9, "B=1": 1.2}).env for seed in range(200)]
    assert sum(env.get("A") == "2" for env in envs) > 180
    assert not any("B" in env for env in envs)


def test_a_setting_that_fails_once_is_not_chosen() -> None:
    network, broken = Network(0, {"A=2": 0.5}), itertools.count()

    def measure(env: Mapping[str, str]) -> Trial:
        if env.get("A") == "2" and next(broken) == 5:
            return Trial(problem="wrong results of all_reduce with 8 bytes")
        return network.trial(env)

    seen = search(measure, KNOBS, lambda _: None)
    assert seen.env == {}
    assert seen.final is not None
    assert seen.final.problem == "wrong results of all_reduce with 8 bytes"
    assert "not confirmed: A=2: does not work" in finding_lines(seen)[-1]


def test_where_the_default_fails_a_setting_is_found() -> None:
    network = Network(0, {})

    def measure(env: Mapping[str, str]) -> Trial:
        return network.trial(env) if env.get("A") == "1" else Trial(problem="no route to host")

    assert search(measure, KNOBS, lambda _: None).env == {"A": "1"}


def test_cells_that_a_slow_trial_omitted_do_not_count() -> None:
    fast = Trial(dict.fromkeys(CELLS, 1.0))
    slow = Trial(dict.fromkeys(CELLS[:2], 2.0))
    assert compare([fast] * 4, [slow] * 4).gain == pytest.approx(1.0)


def test_a_setting_is_written_with_its_evidence() -> None:
    seen = found(0, {"B=2": 0.5})
    text = "\n".join(finding_lines(seen))
    assert "it can change the order of addition" in text
    assert "docs.nvidia.com" in text
    assert yaml.safe_load(text[text.index("job:") :]) == {"job": {"env": {"B": "2"}}}
    data = json.loads(json.dumps(as_data(seen)))
    assert data["changes_order"] is True
    assert data["final"]["faster"] > 10


def test_the_report_of_an_even_field_keeps_the_defaults() -> None:
    assert finding_lines(found(0, {}))[-1].startswith("keep the defaults: ")


def test_sizes_are_read_or_refused() -> None:
    assert sizes_of("8:1G:16")[-2:] == [1 << 27, 1 << 30]
    assert sizes_of("1MiB") == [1 << 20]
    for wrong in ("8:4", "0:1G:2", "8:1G:1", "8:1T", "x", "8:16:2:4", ""):
        with pytest.raises(NetworkError, match="--sizes"):
            sizes_of(wrong)


def test_knobs_fit_the_site_and_the_version() -> None:
    one = Site(nodes=1, ranks=8, version="2.27.3")
    names = {knob.name for knob in knobs_for("nccl", one, {})}
    assert "reduction in the NVLink switch" in names
    assert not names & {"sockets of a connection", "queue pairs of a connection", "rails"}
    tcp = Site(nodes=2, ranks=16, version="2.27.3")
    assert "sockets of a connection" in {knob.name for knob in knobs_for("nccl", tcp, {})}
    old = Site(nodes=2, ranks=16, rdma=True, version="2.10.3")
    names = {knob.name for knob in knobs_for("nccl", old, {})}
    assert "queue pairs of a connection" in names
    assert "algorithm" not in names


def test_a_deterministic_search_keeps_the_order_of_addition() -> None:
    site = Site(nodes=2, ranks=16, rdma=True)
    kept = {
        name
        for knob in knobs_for("nccl", site, {}, deterministic=True)
        for option in knob.options
        for name in option
    }
    assert not kept & {"NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_MIN_CTAS"}
    assert "NCCL_IB_QPS_PER_CONNECTION" in kept


def test_what_is_set_already_is_no_candidate() -> None:
    site = Site(nodes=2, ranks=2, interfaces=("eth0", "ib0"))
    (knob,) = knobs_for("gloo", site, {"GLOO_SOCKET_IFNAME": "eth0"})
    assert knob.options == ({"GLOO_SOCKET_IFNAME": "ib0"},)
    assert knobs_for("gloo", Site(nodes=2, ranks=2), {}) == []
