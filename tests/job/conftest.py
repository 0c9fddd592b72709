"""The desk with substitutes for Slurm's programs."""

import os
from pathlib import Path

import pytest

from .slurm_substitutes import Desk


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a desk with programs that come first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Desk(tmp_path)
