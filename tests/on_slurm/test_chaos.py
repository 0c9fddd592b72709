"""One fault of every kind in one run: the program `tools/chaos.py` on its own cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import cluster
from .conftest import unavailable

# Every kind of fault has a test of its own in CI.
pytestmark = [pytest.mark.slurm, pytest.mark.slow]
TOOL = Path(__file__).resolve().parents[2] / "tools" / "chaos.py"
KINDS = (
    *("preempt", "kill a rank", "kill a node", "cut a link", "scancel, resume"),
    *("stop slurmctld", "time limit"),
)


@pytest.mark.timeout(1600)
def test_faults_of_all_kinds_change_no_bit_and_no_sample() -> None:
    reason = cluster.why_not()
    if reason is not None:
        unavailable(reason)
    # One rank on each of two nodes.
    number = len(KINDS)
    command = [sys.executable, str(TOOL), f"--faults={number}", "--seed=24", "--ranks=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("fault ")]
    assert len(told) == number
    assert all(any(f": {kind} " in line for line in told) for kind in KINDS)
    assert f"{number} faults, weights and samples are identical" in done.stdout
