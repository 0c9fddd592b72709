"""Ten faults of every kind against one run: `tools/chaos.py` as a person types it, on its own cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import cluster
from .conftest import unavailable

pytestmark = pytest.mark.slurm
TOOL = Path(__file__).resolve().parents[2] / "tools" / "chaos.py"
KINDS = (
    *("preempt", "kill a rank", "kill a node", "cut a link", "scancel, resume"),
    *("stop slurmctld", "time limit"),
)


def test_ten_faults_of_all_kinds_change_no_bit_and_no_sample() -> None:
    reason = cluster.why_not()
    if reason is not None:
        unavailable(reason)
    # The three kinds that this seed takes twice are quick ones; one rank on each of two nodes.
    command = [sys.executable, str(TOOL), "--faults", "10", "--seed", "24", "--ranks", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("fault ")]
    assert len(told) == 10
    assert all(any(f": {kind} " in line for line in told) for kind in KINDS)
    assert "10 faults, not a bit and not a sample of difference" in done.stdout
