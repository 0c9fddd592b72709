"""tools/bit_flips.py: no flipped bit of a sweep's file or of results.h5 is silent."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bit_flips.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sweep", "results"])
def test_flipped_bits_are_refused_or_change_nothing(kind: str) -> None:
    command = [sys.executable, str(TOOL), "--flips", "4", "--seed", "3", "--only", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "seed 3: 4 flips, 0 failures" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
