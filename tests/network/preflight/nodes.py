"""Constructed facts of good nodes, in the form that the agents send."""

from __future__ import annotations

import copy
from typing import Any

from hpcrun.network.preflight.checks import JobNeeds, PreflightFacts, Result
from hpcrun.network.preflight.report import results

GIB = 1 << 30
DEVICE = {
    "index": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "uuid": "GPU-0",
    "bus": "00000000:3B:00.0",
    "ecc": 1,
    "uncorrected": 0,
    "remap_pending": False,
    "remap_failed": False,
    "throttling": 0x1,
    "width": 16,
    "full_width": 16,
}
SOUND: dict[str, Any] = {
    "versions": {"python": "3.11.2", "hpcrun": "0.1.0"},
    "libraries": {"torch": "2.6.0", "cuda": "12.4", "nccl": "2.21.5"},
    "limits": {"files": 65536, "processes": None, "locked": None, "rdma": True},
    "space": [{"what": "/dev/shm", "path": "/dev/shm", "free": 9 * GIB, "free_files": 10}],
    "names": {"own": "n1", "loopback": False, "unresolved": []},
    "mtu": {"interface": "ib0", "mtu": 4092},
    "config": {"hash": "ab" * 32},
    "gpus": {"visible": 1, "driver": "550.54"},
    "device": [DEVICE],
    "kernel": {"xids": []},
    "write": {"seconds": 0.004},
    "unseen": {"count": 0, "names": []},
    "product": [
        {"device": "cuda:0", "name": DEVICE["name"], "wrong": 0, "digest": "00", "seconds": 0.0002}
    ],
}


def sound(count: int = 3) -> PreflightFacts:
    """Return a measurement of ``count`` nodes in which nothing is wrong."""
    nodes = [f"n{index}" for index in range(1, count + 1)]
    measured = PreflightFacts(nodes, JobNeeds(gpus=1, run="/runs/a"))
    measured.facts = {node: copy.deepcopy(SOUND) for node in nodes}
    measured.offsets = dict.fromkeys(nodes, (0.001, 0.0005))
    return measured


def told(measured: PreflightFacts, check: str) -> list[Result]:
    """Return the results of one check that are not passes."""
    return [one for one in results(measured) if one.check == check and one.status != "pass"]
