"""Configs and overrides that would take minutes, memory or a traceback, if what is read had no bounds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.config import ConfigError, file_layer, override_layer, resolve
from hpcrun.config.problems import MOST_SHOWN

Lines = Callable[..., list[str]]
MANY = 20_000


def bomb(levels: int, *, mapping: bool) -> str:
    """Return a text in which each level repeats the level before nine times."""
    lines = ["model:", "  a0: &a0 [lol]"]
    for level in range(1, levels):
        names = [f"*a{level - 1}"] * 9
        items = [f"k{number}: {name}" for number, name in enumerate(names)]
        whole = f"{{{', '.join(items)}}}" if mapping else f"[{', '.join(names)}]"
        lines.append(f"  a{level}: &a{level} {whole}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (bomb(11, mapping=False), "has more than 100000 values; an alias"),
        (bomb(11, mapping=True), "has more than 100000 values; an alias"),
        ("model: {a: &a {b: 1, c: *a}}", "is nested too deeply"),
        (f"model: [{'1,' * 400_000}]", "has more than 100000 values"),
        ("model: " + "[" * 500_000, "is nested too deeply"),
        ("model: " + "{a: " * 200_000, "is nested too deeply"),
        ("- " * 100_000, "is nested too deeply"),
        ("\n".join(" " * level + "a:" for level in range(1400)), "is nested too deeply"),
        (
            "model:\n" + "".join(f"  k{one}: {one}\n" for one in range(MANY)) + " x: : y",
            "2: not valid YAML",
        ),
    ],
)
def test_a_text_that_grows_without_bounds_is_refused(lines: Lines, content: str, line: str) -> None:
    (only,) = lines(content)
    assert line in only
    assert len(only) < 200


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(f"key{number}: 1" for number in range(MANY)),
        "train:\n" + "\n".join(f"  lr{number}: 1" for number in range(MANY)),
        "job:\n  env:\n" + "\n".join(f"    {number}x: 1" for number in range(MANY)),
        "\n".join(["seed: 1"] * MANY),
        "optim: [" + ", ".join(["[]"] * MANY) + "]",
    ],
)
def test_thousands_of_problems_are_counted_and_not_shown(lines: Lines, content: str) -> None:
    *shown, last = lines(content)
    assert len(shown) <= MOST_SHOWN
    assert last.startswith("and ") or not shown


def test_thousands_of_overrides_are_merged() -> None:
    config = resolve([override_layer([f"model.k{number}=[{number}]" for number in range(MANY)])])
    assert len(config.model.own) == MANY


@pytest.mark.parametrize(
    "override",
    [
        ".".join(["model", *"a" * 3000]) + "=1",
        "model.a=" + "[" * 1_000_000,
        "model.a=" + "{a: " * 3000,
        "job.env." + ".".join("a" * 3000) + "=1",
        "=".join(["." * 3000, "1"]),
        "model.a=\0",
        "model.\udcff=[\udcff]",
        "train.lr=\udcff",
    ],
)
def test_a_strange_override_gets_one_short_line(
    override_lines: Callable[..., list[str]], override: str
) -> None:
    (only,) = override_lines(override)
    assert len(only) < 400


def test_a_deep_value_of_a_program_is_refused() -> None:
    value: dict[str, object] = {}
    for _ in range(3000):
        value = {"a": value}
    layer = override_layer([])
    with pytest.raises(ConfigError, match="is nested too deeply"):
        resolve([layer.__class__({"model": value})])


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "/dev/null", "/dev/tty"])
def test_a_pipe_or_a_device_is_no_config(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)
    with pytest.raises(ConfigError, match=r"is a pipe or a device|cannot be read"):
        file_layer(path)
