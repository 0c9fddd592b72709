"""Clusters for tests that need another Slurm than the session's."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from . import cluster
from .cluster import SlurmCluster


def running(name: str, **options: object) -> Iterator[SlurmCluster]:
    """Start a separate cluster for the test, or skip if this machine cannot run it."""
    reason = cluster.why_not(cluster.ClusterSpec(**options))  # type: ignore[arg-type]
    if reason is not None:
        pytest.skip(reason)
    name = f"pytest-{os.getpid()}-{name}"
    try:
        yield cluster.start(name, **options)
    finally:
        cluster.stop(name)
