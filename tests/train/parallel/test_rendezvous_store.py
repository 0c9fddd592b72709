"""Ranks open one store with any of the names of rank 0."""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from hpcrun.errors import ClusterError, NotTrainable
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import create
from hpcrun.run.rendezvous import Rendezvous, RendezvousFile
from hpcrun.train.parallel import process_group as gpus
from hpcrun.train.parallel import process_group as store
from hpcrun.train.parallel.process_group import require_gpu_build, second_store
from tests.support.ports import free_port


def config(rank: int, **changes: Any) -> DistributedConfig:
    fields = {"world_size": 2, "rank": rank, "local_rank": rank, "num_gpus_per_node": 2}
    return DistributedConfig.model_validate({**fields, "launch_method": "slurm", **changes})


@pytest.fixture
def attempt(tmp_path: Path) -> RendezvousFile:
    """The rendezvous of the ranks."""
    return RendezvousFile(create(tmp_path / "a", "x", {}), Attempt("7", 0))


def hold_and_join(
    attempt: RendezvousFile, monkeypatch: pytest.MonkeyPatch, addresses: list[str], port: int
) -> tuple[Any, Any]:
    """Connect rank 0 and rank 1, and return the config and the store of each."""
    monkeypatch.setattr(store, "rendezvous_addresses", lambda *_: addresses)
    first = store.meet(config(0), attempt, [port], interface=None, timeout=30)
    second = store.meet(config(1), attempt, [port], interface=None, timeout=30)
    first[1].set("word", "from rank 0")
    assert second[1].get("word") == b"from rank 0"
    assert first[0].master_port == second[0].master_port == port
    return first, second


@pytest.mark.parametrize(("ranks", "connected"), [(2, False), (1000, True)])
def test_the_store_s_timeout_grows_with_the_ranks(ranks: int, connected: bool) -> None:
    port, held = free_port(), []

    def hold() -> None:
        held.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    late = threading.Timer(3.0, hold)
    late.start()
    many = config(1, world_size=ranks, num_nodes=ranks // 2, master_port=port)
    store = second_store(many, "hang", timeout=0.5)
    late.join()
    assert (store is not None) is connected
    if store is not None:
        before = time.monotonic()
        with pytest.raises(RuntimeError):
            store.get("missing")
        # A request keeps its timeout.
        assert time.monotonic() - before < 10


def test_names_that_do_not_resolve_are_skipped(
    attempt: RendezvousFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["no-such-host.invalid", "a" * 70 + ".invalid", "127.0.0.1"]
    found = hold_and_join(attempt, monkeypatch, names, free_port())
    assert [met.master_addr for met, _ in found] == ["127.0.0.1"] * 2


def test_an_address_of_another_host_is_skipped(
    attempt: RendezvousFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listen with another job's store at one of rank 0's addresses, and with no store at another."""
    port = free_port()
    other = TCPStore("127.0.0.2", free_port(), is_master=True, wait_for_workers=False)
    deaf = socket.create_server(("127.0.0.1", 0))
    ports = {"theirs": other.port, "deaf": deaf.getsockname()[1], "ours": port}

    def connect(name: str, met: Rendezvous, patience: float) -> Any:
        there = Rendezvous(met.addresses, ports[name], key=met.key)
        found = real("127.0.0.1", there, 1.0, handshake=1.0)
        asked.append((name, found is not None))
        return found and (name, found[1])

    real, asked = store.connect_store, []
    monkeypatch.setattr(store, "connect_store", connect)
    with deaf:
        hold_and_join(attempt, monkeypatch, ["theirs", "deaf", "ours"], port)
    assert asked == [("theirs", False), ("deaf", False), ("ours", True)]


def test_rank_0_listens_on_all_addresses_and_both_protocols(
    attempt: RendezvousFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    held = hold_and_join(attempt, monkeypatch, ["127.0.0.1"], port)
    assert held
    for address in ("127.0.0.3", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.3",):
        store = TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=10))
        assert store.check(["hpcrun/rendezvous"])


def test_a_rank_of_another_node_sets_its_address_for_gloo(
    attempt: RendezvousFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {}

    def gloo_interface(environ: Any, peers: list[str]) -> dict[str, str]:
        asked[threading.current_thread().name] = peers
        return {}

    monkeypatch.setattr(store, "gloo_interface", gloo_interface)
    monkeypatch.setattr(store, "rendezvous_addresses", lambda *_: ["127.0.0.1"])
    monkeypatch.setattr(store, "outward_address", lambda peers: f"the way to {peers[0]}")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    port, wide = free_port(), {"num_nodes": 2, "num_gpus_per_node": 1, "local_rank": 0}

    def join(rank: int) -> None:
        told = config(rank, node_rank=rank, **wide)
        store.meet(told, attempt, [port], interface=None, timeout=60)

    threads = [threading.Thread(target=join, args=(rank,), name=str(rank)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == {"0": ["the way to 127.0.0.1"], "1": ["127.0.0.1"]}


def test_a_torch_without_cuda_is_reported_with_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(gpus.accelerator, "count", lambda: 0)
    wanted = config(0, backend="nccl", device_ids=(0,))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(NotTrainable, match=r"2 GPU\(s\).*without CUDA and ROCm.*--cpu"):
        require_gpu_build(wanted)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(ClusterError, match=r"built for ROCm 6\.2.*--rocm"):
        require_gpu_build(wanted)
    require_gpu_build(config(0, backend="gloo"))
    monkeypatch.setattr(gpus.accelerator, "count", lambda: 2)
    require_gpu_build(wanted)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
