"""Sweep files: grid and list, and lines that say what is wrong where."""

from pathlib import Path
from typing import Any

import pytest

from hpcrun.api.sweeps.request import expand, read_sweep_file
from hpcrun.config import ConfigError


def rows(folder: Path, text: str) -> list[dict[str, Any]]:
    path = folder / "sweep.yaml"
    path.write_text(text)
    found = expand(read_sweep_file(path))
    return [{key: given.value for key, given in row.items()} for row in found]


def test_the_blocks_are_multiplied(tmp_path: Path) -> None:
    text = """
grid:
  seed: [0, 1]
list:
  - {train.lr: 1e-4, train.batch_size: 32}
  - {train.lr: 2e-4, train.batch_size: 64}
"""
    assert rows(tmp_path, text) == [
        {"seed": 0, "train.lr": 1e-4, "train.batch_size": 32},
        {"seed": 0, "train.lr": 2e-4, "train.batch_size": 64},
        {"seed": 1, "train.lr": 1e-4, "train.batch_size": 32},
        {"seed": 1, "train.lr": 2e-4, "train.batch_size": 64},
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("gird: {seed: [1]}", "sweep.yaml:1: gird: unknown; a sweep file has grid"),
        ("{}", "has no values"),
        ("grid: [1]", "should be keys with their values"),
        ("grid: {seed: 1}", "seed: should be a list"),
        (
            "grid: {train: {lr: [1]}}",
            "train: should be a list of values; write sections as in train.lr",
        ),
        ("list: [1]", "should be a list of runs"),
        ("list: [{a: 1}, {b: 1}]", "run 2 and run 1 differ in their keys: a, b"),
        ("grid:\n  seed: [0]\n  train.lr: 3\n", "sweep.yaml:3: train.lr: should be a list"),
        ("grid: {a: [1]}\nlist: [{a: 1}]", "sweep.yaml:2: a: .*sweep.yaml:1 has this key too"),
        ("grid:\n  a: [1\n", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        rows(tmp_path, text)
    assert len(refused.value.lines) == 1
