"""Bandwidths equal those of nccl-tests, and the report gives the setting, its reason and its cost."""

import json

import pytest
import yaml

from hpcrun.errors import NetworkError
from hpcrun.network.tune.search import (
    Cell,
    Found,
    Knob,
    Site,
    Timing,
    Trial,
    TriedOption,
    as_data,
    as_yaml,
    bus_factor,
    changes_order,
    collectives_of,
    compare,
    finding_lines,
    knobs_for,
    sizes_of,
)

CELLS = [Cell("all_reduce", 8), Cell("all_reduce", 1 << 20), Cell("all_gather", 1 << 20)]
KNOB = Knob("channels, at least", "", ({"NCCL_MIN_CTAS": "8"},), order=True, source="env")


def trials(factor: float, small: float = 1.0) -> list[Trial]:
    times = {CELLS[0]: 1e-5 * small, CELLS[1]: 1e-3 * factor, CELLS[2]: 2e-3 * factor}
    return [Trial({cell: Timing(value) for cell, value in times.items()}) for _ in range(5)]


def found(env: dict[str, str]) -> Found:
    default, setting = trials(1.0), trials(0.5, small=1.2)
    compared = compare(setting, default)
    tried = TriedOption(KNOB, KNOB.options[0], compared, compared, kept=bool(env))
    return Found(env, [tried], compared if env else None, setting if env else [], default)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("alltoall", 0.875),
        ("broadcast", 1.0),
        ("sendrecv", 1.0),
    ],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(collective: str, factor: float) -> None:
    assert bus_factor(collective, 8) == pytest.approx(factor)


def test_a_setting_is_written_with_its_evidence() -> None:
    text = as_yaml(found({"NCCL_MIN_CTAS": "8"}), "nccl, 8 ranks, 2 nodes")
    assert yaml.safe_load(text) == {"job": {"env": {"NCCL_MIN_CTAS": "8"}}}
    assert "docs.nvidia.com" in text
    lines = finding_lines(found({"NCCL_MIN_CTAS": "8"}))
    assert lines[-1].startswith("NCCL_MIN_CTAS: can change the order of addition")


def test_the_default_is_written_as_an_empty_environment() -> None:
    text = as_yaml(found({}), "gloo, 2 ranks, this machine")
    assert yaml.safe_load(text) == {"job": {"env": {}}}
    assert "keep the defaults: no setting is faster in fresh trials" in text


def test_the_data_is_json() -> None:
    data = json.loads(json.dumps(as_data(found({"NCCL_MIN_CTAS": "8"}), 4, {"ranks": 4})))
    assert data["changes_order"] == ["NCCL_MIN_CTAS"]
    (cell,) = [one for one in data["default"][0]["cells"] if one["collective"] == "all_gather"]
    assert cell["busbw"] == pytest.approx(cell["algbw"] * 0.75)
    assert data["tried"][0]["kept"] is True


def test_sizes_and_collectives_are_read_or_refused() -> None:
    assert sizes_of("8:1G:16")[-2:] == [1 << 27, 1 << 30]
    assert sizes_of("1MiB") == [1 << 20]
    for wrong in ("8:4", "0:1G:2", "8:1G:1", "8:1T", "x", "8:16:2:4", ""):
        with pytest.raises(NetworkError, match="--sizes"):
            sizes_of(wrong)
    assert collectives_of("alltoall,alltoall") == ["alltoall"]
    with pytest.raises(NetworkError, match="no such collective"):
        collectives_of("allreduce")


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
    for knob in knobs_for("nccl", site, {}, deterministic=True):
        for option in knob.options:
            assert changes_order(option) == []
    assert {"NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_MIN_CTAS"} <= {
        name
        for knob in knobs_for("nccl", site, {})
        for option in knob.options
        for name in changes_order(option)
    }


def test_what_is_set_already_is_no_candidate() -> None:
    site = Site(nodes=2, ranks=2, interfaces=("eth0", "ib0"))
    (knob,) = knobs_for("gloo", site, {"GLOO_SOCKET_IFNAME": "eth0"})
    assert knob.options == ({"GLOO_SOCKET_IFNAME": "ib0"},)
    assert knobs_for("gloo", Site(nodes=2, ranks=2), {}) == []
