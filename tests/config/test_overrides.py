"""Overrides on the command line, and the merge of layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcrun.config import Config, file_layer, flag_layer, override_layer, resolve

Write = Callable[..., str]
Lines = Callable[..., list[str]]


def overridden(*overrides: str) -> Config:
    return resolve([override_layer(overrides)])


def test_layers_win_in_the_order_given(write: Write) -> None:
    layers = [
        file_layer(write("train: {lr: 1, steps: 10}\njob: {nodes: 1}\n")),
        override_layer(["train.lr=2", "job.nodes=2"]),
        flag_layer({"job.nodes": (4, "--nodes")}),
    ]
    config = resolve(layers)
    assert (config.train.lr, config.train.steps, config.job.nodes) == (2, 10, 4)


def test_mappings_are_merged_and_lists_are_replaced(write: Write) -> None:
    path = write("job:\n  env: {A: a, B: b}\n  setup: [one, two]\nmodel: {x: {y: 1, z: 2}}\n")
    overrides = ["job.env.B=c", "job.env={C: d}", "job.setup=[three]", "model.x.y=5"]
    config = resolve([file_layer(path), override_layer(overrides)])
    assert config.job.env == {"A": "a", "B": "c", "C": "d"}
    assert config.job.setup == ["three"]
    assert config.model.own == {"x": {"y": 5, "z": 2}}


@pytest.mark.parametrize(
    "value",
    [
        "a: b",
        "[x",
        "'",
        '"quoted"',
        "$(rm -rf /); `x` & | > < *",
        "ünïcødé 🚀",
        "a=b",
        " x ",
        "",
        "#",
    ],
)
def test_text_on_the_command_line_is_taken_literally(value: str) -> None:
    assert overridden(f"job.env.X={value}").job.env == {"X": value}


def test_null_removes_a_value(write: Write) -> None:
    path = write("job: {partition: gpu, time: 90}\ntrain: {clip_norm: 2}\n")
    overrides = ["job.partition=null", "job.time=null", "train.clip_norm=null"]
    config = resolve([file_layer(path), override_layer(overrides)])
    assert (config.job.partition, config.job.time, config.train.clip_norm) == (None, None, None)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.lr", "command line: train.lr: write an override as KEY=VALUE, such as train.lr=1"),
        ("", "command line: write an override as KEY=VALUE, such as seed=1"),
        ("=3", "command line: =3: has no key before =; write KEY=VALUE"),
        ("train.lr=", "command line: train.lr: should be a number, not ''"),
        ("train.lr=[1", "command line: train.lr: not valid YAML: "),
        (
            "train.lr=\udcff",
            "command line: train.lr: a config may not contain the character 0xdcff",
        ),
        ("model.x={a: 1, a: 2}", "command line: model.x.a: is given twice"),
        ("train.lr=\t1\t", "command line: train.lr: not valid YAML: a tab in the indentation"),
        ("train.lr=fast", "command line: train.lr: should be a number, not 'fast'"),
        ("train.lrr=1", "command line: train.lrr: unknown key; did you mean train.lr?"),
        ("trian.lr=1", "command line: trian: unknown key; did you mean train?"),
        ("train.lr.x=1", "command line: train.lr: should be a number, not "),
        ("a\nb=1", "command line: a\\nb: unknown key"),
    ],
)
def test_an_invalid_override_is_refused(override_lines: Lines, override: str, line: str) -> None:
    (only,) = override_lines(override)
    assert only.startswith(line)


def test_a_number_sign_in_a_value_is_not_a_comment() -> None:
    given = override_layer(["data.folder=/data/set #2", "data.quoted='a #b' # c"])
    assert given.values["data"] == {"folder": "/data/set #2", "quoted": "a #b"}
