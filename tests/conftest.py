"""Fixtures that several rooms' tests share."""

import os
import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """A TCP port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment must not look like a launcher's."""
    for name in os.environ:
        if name.startswith(("SLURM_", "SBATCH_", "OMPI_", "TORCHELASTIC_", "HPCRUN_RUN")):
            monkeypatch.delenv(name)
