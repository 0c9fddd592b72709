"""Placeholders in a command: full keys, last components, braces of other meaning."""

import pytest

from hpcrun.api.sweeps.configs import filled, placeholder_keys
from hpcrun.api.sweeps.request import SweepValue
from hpcrun.errors import UserError

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
