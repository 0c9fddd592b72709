"""Fixtures that several rooms' tests share."""

import os
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
