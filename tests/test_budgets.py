"""Budgets of lines and files for each package: growth is a decision, and its commit says why.

A line is a line of a Python file, with comments and blank lines. Lower a budget when code goes.
"""

from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST = 500
"""The most lines of a file."""

BUDGETS: dict[str, tuple[int, int]] = {
    "api": (4_180, 25),
    "checkpoint": (6_240, 33),
    "cli": (4_740, 34),
    "config": (2_910, 14),
    "devices": (670, 6),
    "diagnose": (1_690, 9),
    "estimate": (1_180, 9),
    "hpcrun": (720, 9),
    "integrations": (3_270, 14),
    "job": (5_180, 23),
    "network": (4_150, 18),
    "nodes": (1_480, 7),
    "ranks": (3_260, 15),
    "results": (3_700, 18),
    "run": (3_310, 16),
    "slurm": (4_120, 24),
    "tasks": (1_070, 8),
    "tests": (54_120, 433),
    "train": (9_870, 49),
}
"""The most lines and files of each package, and of the tests."""


def sizes() -> dict[str, list[int]]:
    """Return the number of lines of every file, by package; ``hpcrun`` is the top level of the package."""
    found: dict[str, list[int]] = defaultdict(list)
    for path in sorted([*(ROOT / "hpcrun").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        parts = path.relative_to(ROOT).parts
        name = parts[1] if parts[0] == "hpcrun" and len(parts) > 2 else parts[0]
        found[name].append(len(path.read_text(encoding="utf-8").splitlines()))
    return found


SIZES = sizes()


def test_every_package_has_a_budget() -> None:
    assert sorted(SIZES) == sorted(BUDGETS)


@pytest.mark.parametrize("package", BUDGETS)
def test_a_package_is_within_its_budget(package: str) -> None:
    lines, files = BUDGETS[package]
    assert sum(SIZES[package]) <= lines
    assert len(SIZES[package]) <= files


def test_no_file_is_longer_than_500_lines() -> None:
    assert [name for name, counts in SIZES.items() if max(counts) > LONGEST] == []
