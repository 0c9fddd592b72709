"""Sweep files: grid, zip, list and random draws, and lines that say what is wrong where."""

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
  seed: {range: [0, 2]}
zip:
  train.lr: [1e-4, 2e-4]
  train.batch_size: [32, 64]
"""
    assert rows(tmp_path, text) == [
        {"seed": 0, "train.lr": 1e-4, "train.batch_size": 32},
        {"seed": 0, "train.lr": 2e-4, "train.batch_size": 64},
        {"seed": 1, "train.lr": 1e-4, "train.batch_size": 32},
        {"seed": 1, "train.lr": 2e-4, "train.batch_size": 64},
    ]


def test_a_list_and_nested_sections(tmp_path: Path) -> None:
    text = "list:\n  - {train: {lr: 1.0}, seed: 1}\n  - {train.lr: 2.0, seed: 2}\n"
    assert rows(tmp_path, text) == [{"train.lr": 1.0, "seed": 1}, {"train.lr": 2.0, "seed": 2}]


RANDOM = """
random:
  seed: 7
  count: {count}
  train.lr: {{log_uniform: [1e-5, 1e-2]}}
  train.batch_size: {{choice: [32, 64]}}
  optim.warmup_steps: {{integer: [0, 3]}}
  optim.weight_decay: {{uniform: [0, 1]}}
"""


def test_random_draws_depend_on_the_seed_not_on_the_count(tmp_path: Path) -> None:
    few, many = (rows(tmp_path, RANDOM.format(count=count)) for count in (5, 50))
    assert many[:5] == few
    assert all(1e-5 <= row["train.lr"] <= 1e-2 for row in many)
    assert {row["train.batch_size"] for row in many} == {32, 64}
    assert {row["optim.warmup_steps"] for row in many} == {0, 1, 2, 3}
    # Half of a log-uniform draw is below the geometric mean.
    assert 10 < sum(row["train.lr"] < 10**-3.5 for row in many) < 40


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("gird: {seed: [1]}", "sweep.yaml:1: gird: unknown; a sweep file has grid"),
        ("{}", "has no values"),
        ("grid: [1]", "should be keys with their values"),
        ("grid: {seed: 1}", "seed: should be a list"),
        ("grid: {seed: {range: [1]}}", "range should be"),
        ("zip: {a: [1, 2], b: [1]}", "a has 2, b has 1"),
        ("list: [1]", "should be a list of runs"),
        ("list: [{a: 1}, {b: 1}]", "run 2 and run 1 differ in their keys: a, b"),
        ("random: {count: 3, a: {uniform: [0, 1]}}", "needs whole numbers `seed:` and `count:`"),
        ("random: {seed: 1, count: 3, a: [1]}", "should be one of choice"),
        ("random: {seed: 1, count: 3, a: {uniform: [1, 0]}}", "low < high"),
        ("random: {seed: 1, count: 3, a: {integer: [0.5, 1]}}", "needs whole numbers"),
        ("random: {seed: 1, count: 3, a: {log_uniform: [0, 1]}}", "above 0"),
        ("grid:\n  seed: [0]\n  train.lr: 3\n", "sweep.yaml:3: train.lr: should be a list"),
        (
            "random:\n  seed: 1\n  count: 2\n  lr: {uniform: 1}\n",
            "sweep.yaml:4: lr: uniform needs a list",
        ),
        ("grid: {a: [1]}\nzip: {a: [1]}", "sweep.yaml:2: a: .*sweep.yaml:1 has this key too"),
        ("grid: {a: [1]}\nwhere: 3", "list of expressions"),
        ("grid:\n  a: [1\n", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        rows(tmp_path, text)
    assert len(refused.value.lines) == 1
