"""Output of real programs: Slurm's, recorded by ``tools/record_slurm.py``, and torchrun 2.13's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

RECORDED = Path(__file__).parent / "recorded"
VERSIONS = ("22.05", "24.11", "26.05")


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Yield each recorded version of Slurm."""
    return str(request.param)


@pytest.fixture
def recorded() -> Callable[[str], str]:
    """Return the text of a recording, by its path below ``recorded``."""
    return lambda name: (RECORDED / name).read_text()


@pytest.fixture
def printed(version: str) -> Callable[[str], str]:
    """Return the text of a recording of each version."""
    return lambda name: (RECORDED / version / name).read_text()


@pytest.fixture
def jobs(printed: Callable[[str], str]) -> dict[str, str]:
    """Return the ids of the recorded jobs, by the names of their scenes."""
    ids: dict[str, str] = json.loads(printed("jobs.json"))
    return ids


@pytest.fixture
def recorded_env(version: str) -> Callable[[str], dict[str, str]]:
    """Return the variables of a recorded process: of each version of Slurm, or of torchrun."""

    def read(name: str) -> dict[str, str]:
        folder = RECORDED if name == "torchrun" else RECORDED / version
        lines = (folder / f"{name}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    return read
