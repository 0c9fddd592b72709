"""Fixtures that several rooms' tests share."""

import contextlib
import os
import random
import socket
from pathlib import Path

import pytest

# Those that wait most take longest: begun last, one of them would keep the other workers waiting.
_LONGEST = ("slurm/test_chaos", "slurm/", "test_main_job", "launch/", "test_quickstart", "tools/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long files first; within a file, and among the others, the order stays."""

    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(Path(__file__).parent).as_posix()
        found = [number for number, start in enumerate(_LONGEST) if place.startswith(start)]
        return min(found, default=len(_LONGEST))

    items.sort(key=rank)


@pytest.fixture
def free_port() -> int:
    """A TCP port of loopback that nobody listens on.

    Out of the range from which the kernel gives a port to whoever asks for any: between this and its
    use, another test's connection would take it.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = list(range(max(1024, lowest - 8000), lowest))
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@pytest.fixture(autouse=True)
def outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment must not look like a launcher's."""
    for name in os.environ:
        if name.startswith(("SLURM_", "SBATCH_", "OMPI_", "TORCHELASTIC_", "HPCRUN_RUN")):
            monkeypatch.delenv(name)
