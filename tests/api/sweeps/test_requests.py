"""Requests of sweeps: axes, sweep files and placeholders of a command, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from hpcrun.api.sweeps.configs import filled, placeholder_keys
from hpcrun.api.sweeps.request import (
    SweepRequest,
    SweepValue,
    canonical,
    expand,
    read_axes,
    read_sweep_file,
)
from hpcrun.config import ConfigError
from hpcrun.errors import UserError


def values(request: SweepRequest) -> list[dict[str, Any]]:
    return [{key: given.value for key, given in row.items()} for row in expand(request)]


def axes(*options: str) -> SweepRequest:
    return SweepRequest(read_axes(options))


def test_a_grid_has_all_combinations_the_last_axis_changes_fastest() -> None:
    assert values(axes("train.lr=1e-4,3e-4", "seed=0:2")) == [
        {"train.lr": 1e-4, "seed": 0},
        {"train.lr": 1e-4, "seed": 1},
        {"train.lr": 3e-4, "seed": 0},
        {"train.lr": 3e-4, "seed": 1},
    ]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("seed=0:5", [0, 1, 2, 3, 4]),
        ("seed=0:10:4", [0, 4, 8]),
        ("seed=0:2,7", [0, 1, 7]),
        ("optim.betas=[0.9,0.95],[0.8,0.9]", [[0.9, 0.95], [0.8, 0.9]]),
        ("optim.name=adamw,sgd", ["adamw", "sgd"]),
        ("words='a,b',c", ["a,b", "c"]),
        ("job.time=1:00:00,2:00:00", ["1:00:00", "2:00:00"]),
        ("train.compile=true,false", [True, False]),
    ],
)
def test_the_values_of_an_axis(option: str, expected: list[Any]) -> None:
    (key,) = {key for row in values(axes(option)) for key in row}
    assert [row[key] for row in values(axes(option))] == expected


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["seed"], "write an axis as KEY=VALUES"),
        (["seed="], "has no values"),
        (["seed=5:5"], "empty range"),
        (["seed=0:5:0"], "step 0"),
        (["seed=0:99999999"], "more than 100000 numbers"),
        (["seed=1", "seed=2"], "is given twice; write all its values"),
        (["seed=1,1"], "seed=1: is given twice"),
        (["a=0:1000", "b=0:1000"], "1000000 runs are more than 100000"),
        (["lr=[1,2"], "not valid YAML"),
    ],
)
def test_a_wrong_axis_is_one_line(options: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        expand(axes(*options))
    assert len(refused.value.lines) == 1
    assert refused.value.lines[0].startswith("--sweep")


def test_equal_values_have_one_canonical_text() -> None:
    assert canonical({"a": 1, "b": [2]}) == canonical({"b": [2], "a": 1.0})
    assert canonical({"a": True}) != canonical({"a": 1})


def rows(folder: Path, text: str) -> list[dict[str, Any]]:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return values(read_sweep_file(path))


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


ROW = {"train.lr": SweepValue(1e-4, "1e-4"), "seed": SweepValue(3, "3")}


def fill(*command: str) -> list[str]:
    return filled(command, ROW, placeholder_keys(command, list(ROW)))


def test_a_key_and_its_last_component_are_replaced() -> None:
    assert fill("train.py", "--lr={lr}", "{train.lr}", "{seed}-{seed}") == [
        "train.py", "--lr=1e-4", "1e-4", "3-3",
    ]  # fmt: skip


def test_other_braces_stay() -> None:
    words = ["{}", '{"a": 1}', "${HOME", "{ lr }", "a}b"]
    assert fill(*words) == words
    assert fill("{{lr}}") == ["{lr}"]


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("{sed}", r"\{sed\} is not a key of the sweep; did you mean \{seed\}\?"),
        ("{zebra}", r"the sweep has train\.lr, seed"),
    ],
)
def test_an_unknown_placeholder_is_refused_with_the_nearest_name(word: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as refused:
        fill(word)
    assert "\n" not in str(refused.value)


def test_an_ambiguous_placeholder_is_refused() -> None:
    with pytest.raises(UserError, match=r"may be train\.lr or other\.lr; write the whole key"):
        placeholder_keys(["{lr}"], ["train.lr", "other.lr"])
