"""The nodes of an attempt agree on an interface; the nodes are threads of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hpcrun.ranks import interfaces as module
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import shared_interface
from hpcrun.run.directory import RunDirectory, RunError, create
from hpcrun.run.endings import node_name
from hpcrun.run.events import Attempt


def rank(node: int, nodes: int, local: int = 0) -> DistributedConfig:
    """Return the rank ``local`` of a node with two ranks."""
    fields = {"rank": 2 * node + local, "local_rank": local, "node_rank": node, "num_nodes": nodes}
    sizes = {"world_size": 2 * nodes, "num_gpus_per_node": 2, "launch_method": "slurm"}
    return DistributedConfig.model_validate({**fields, **sizes})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run directory."""
    return create(tmp_path / "a", "x", {})


def chosen(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, nodes: list[Mapping[str, list[str]]]
) -> list[Any]:
    """Return the result of each rank of the nodes, or its error message."""
    left = iter(nodes)
    monkeypatch.setattr(module, "own_interfaces", lambda: next(left))
    monkeypatch.setattr(module, "link_speeds", dict)

    def ask(config: DistributedConfig) -> str:
        try:
            return shared_interface(run, Attempt("7", 0), config, 120, pause=0.1)
        except RunError as error:
            return str(error)

    ranks = [rank(node, len(nodes), local) for node in range(len(nodes)) for local in (0, 1)]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(ask, ranks))


def test_all_ranks_get_the_interface_that_all_nodes_reach(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        {"mgmt0": ["127.0.3.1"], "ib0": ["127.0.0.1"]},
        {"ib0": ["127.0.0.2"]},
        {"mgmt0": ["127.0.3.3"], "ib0": ["127.0.0.3"]},
    ]
    assert chosen(run, monkeypatch, nodes) == ["=ib0"] * 6


def test_without_a_common_interface_each_node_s_reach_is_listed(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = chosen(run, monkeypatch, [{"eth0": ["127.0.0.1"]}, {"eth1": ["127.0.0.2"]}])
    assert len(set(told)) == 1
    assert (
        f"no interface connects every node to every other ({node_name()}: none; {node_name()}: none)"
        in told[0]
    )


def test_a_node_that_does_not_come_names_the_file(run: RunDirectory) -> None:
    with pytest.raises(RunError, match=r"door-1\.json: no such file after 0 s"):
        shared_interface(run, Attempt("7", 0), rank(0, 2), 0.1)
