"""Faults at random moments of a restart, of each kind: the program `tools/chaos.py` on its own cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import cluster
from .conftest import unavailable

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TOOL = Path(__file__).resolve().parents[2] / "tools" / "chaos.py"
NUMBER = 11


@pytest.mark.timeout(1600)
def test_a_fault_during_a_restart_loses_nothing() -> None:
    reason = cluster.why_not()
    if reason is not None:
        unavailable(reason)
    options = (f"--faults={NUMBER}", "--seed=3", "--ranks=1", "--during-restarts")
    command = [sys.executable, str(TOOL), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    struck = [line for line in done.stdout.splitlines() if line.startswith("fault ")]
    kinds = {line.partition("a rank, then ")[2].partition("  ")[0] for line in struck}
    assert len(kinds) == NUMBER, done.stdout
    assert f"{NUMBER} faults, weights and samples are identical" in done.stdout
