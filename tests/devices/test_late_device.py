"""Ordering faults on an accelerator: on a simulated device, which works as late as the program allows.

``late_device.py`` says what it can show and what it cannot.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.utils.backend_registration

ROOT = Path(__file__).parents[2]
PARTS = (
    "readback of the decision",
    "staging of a checkpoint",
    "resume",
    "readback of the loss",
    "copy of a batch",
)


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    """Return the results of ``late_device_program.py``, run in a separate process."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices written in Python")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.devices.late_device_program"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("part", PARTS)
def test_late_work_changes_no_number(played: dict[str, Any], part: str) -> None:
    assert played["parts"][part]["right"]


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_synchronization_shows(played: dict[str, Any], part: str) -> None:
    assert not played["parts"][part]["right with the fault"]


def test_a_whole_run_waits_only_for_decisions(played: dict[str, Any]) -> None:
    assert played["wrong in a whole run"] == []
