"""What the real programs printed, recorded on a four-node Slurm 22.05 and with torchrun 2.13."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def recorded() -> Callable[[str], str]:
    """Return the text of a recording."""
    return lambda name: (RECORDED / name).read_text()


@pytest.fixture
def recorded_env() -> Callable[[str], dict[str, str]]:
    """Return the variables of one recorded process."""

    def read(name: str) -> dict[str, str]:
        lines = (RECORDED / f"{name}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    return read
