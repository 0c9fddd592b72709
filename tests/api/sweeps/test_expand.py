"""Axes and blocks: which runs a sweep has, in which order, and what is refused."""

from typing import Any

import pytest

from hpcrun.api.sweeps.request import SweepRequest, canonical, expand, read_axes
from hpcrun.config import ConfigError


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
