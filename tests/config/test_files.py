"""Reading a config file: values arrive unchanged, and errors name their line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from hpcrun.config import Config, ConfigError, file_layer, load_resolved, resolve

Write = Callable[..., str]
Lines = Callable[..., list[str]]


def load(path: str) -> Config:
    return resolve([file_layer(path)])


def test_a_program_reads_a_config_with_overrides(write: Write) -> None:
    path = write("train: {lr: 1e-3, steps: 5}\n")
    config = Config.from_file(path, "train.steps=7", "seed=3")
    assert (config.train.lr, config.train.steps, config.seed) == (1e-3, 7, 3)
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        Config.from_file(path, "train.stepz=7")


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("compression", "did you mean train.comm_hook?"),
        ("qqq", "`hpcrun config schema` lists all keys"),
    ],
)
def test_a_stored_config_of_another_version_names_both_remedies(
    write: Write, key: str, near: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_resolved(write(f"train:\n  {key}: 1\n  lr: x\n"))
    first, second = refused.value.lines
    assert f"unknown key; {near}" in first
    assert first.endswith("wrote the file, continue the run with that version")
    assert "version" not in second


@pytest.mark.parametrize("content", ["", "\n\n", "# only a comment\n", "---\n", "null\n", "\ufeff"])
def test_an_empty_file_gives_the_defaults(write: Write, content: str) -> None:
    assert load(write(content)) == Config()


def test_a_section_with_every_line_commented_out_keeps_its_defaults(write: Write) -> None:
    path = write("train:\n  # lr: 1\njob:\n  env:\n  setup:\nmodel:\n")
    assert load(path) == Config()


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "+3e-4", "3.e-4", ".0003", "0.0003", "'3e-4'"])
def test_every_spelling_of_a_number_is_that_number(write: Write, text: str) -> None:
    assert load(write(f"train: {{lr: {text}}}")).train.lr == 3e-4


def test_a_text_key_takes_its_value_as_written(write: Write) -> None:
    config = load(
        write(
            "job:\n  time: 1:30:00\n  account: 0123\n  partition: no\n"
            "  env: {A: 2.10, B: 010, C: false, D: 1e5, E: '', F: 2024-01-01, G: null x}\n"
            "  setup: [2.10, 'module load a b']\n"
        )
    )
    assert config.job.time_seconds == 5400
    assert config.job.account == "0123"
    assert config.job.partition == "no"
    assert config.job.env == {
        "A": "2.10",
        "B": "010",
        "C": "false",
        "D": "1e5",
        "E": "",
        "F": "2024-01-01",
        "G": "null x",
    }
    assert config.job.setup == ["2.10", "module load a b"]


def test_the_tasks_own_keys_keep_their_yaml_types(write: Write) -> None:
    config = load(write("model: {a: 1, b: 1.5, c: yes, d: true, e: null, f: [1, {g: x}], h: 1:30}"))
    assert config.model.own == {
        "a": 1,
        "b": 1.5,
        "c": "yes",
        "d": True,
        "e": None,
        "f": [1, {"g": "x"}],
        "h": "1:30",
    }


def test_json_gives_the_same_config_as_yaml(write: Write) -> None:
    values = {
        "name": "größe-1",
        "train": {"lr": 3e-4, "steps": 20},
        "job": {"env": {"A": "tab\there / \u2028 \x7f \U0001f600"}, "setup": ['a "b"']},
        "model": {"path": "a\\b", "flag": True, "none": None},
    }
    expected = Config.model_validate(values)
    assert load(write(json.dumps(values, indent="\t"), "a.json")) == expected
    assert load(write(json.dumps(values, ensure_ascii=False), "b.json")) == expected
    assert load(write(json.dumps(values).replace("/", "\\/"), "c.json")) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"seed": 1,', "1: not valid JSON: Expecting property name"),
        ('{"seed": 1}\n{"seed": 2}', "2: not valid JSON: Extra data in column 1"),
        ('{"seed": 1\n "name": "a"}', "2: not valid JSON: Expecting ',' delimiter in column 2"),
        ('{"model": ' + "[" * 5000, "1: is nested too deeply"),
        ('{"seed": 1, "seed": 2}', "1: seed: is given twice"),
    ],
)
def test_broken_json_is_refused_as_json(write: Write, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"a.json:{reason}")):
        load(write(text, "a.json"))
    assert load(write("{seed: 2}  # YAML of this form is read too", "b.json")).seed == 2


def test_keys_given_twice_are_all_refused_at_every_level(lines: Lines) -> None:
    content = (
        "seed: 1\ntrain:\n  lr: 1\n  lr: 2\nmodel:\n  a:\n    b: 1\n    b: 1\n"
        "seed: 1\ntrain:\n  steps: 3\n"
    )
    again = "remove one of them"
    assert lines(content) == [
        f"run.yaml:4: train.lr: is given twice, first on line 3; {again}",
        f"run.yaml:8: model.a.b: is given twice, first on line 7; {again}",
        f"run.yaml:9: seed: is given twice, first on line 1; {again}",
        f"run.yaml:10: train: is given twice, first on line 2; {again}",
    ]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("train:\n\tlr: 1\n", "run.yaml:2: not valid YAML: a tab in the indentation"),
        ("name: a: b\n", "run.yaml:1: not valid YAML: a second ': ' in one line"),
        ("a: 'x\n\n", "run.yaml:3: not valid YAML: found unexpected end of stream"),
        ("seed: 1\n--- \nseed: 2\n", "run.yaml:2: not valid YAML: "),
        ("model: *nowhere\n", "run.yaml:1: not valid YAML: found undefined alias"),
        ("seed: 1\nname: a\x00b\n", "run.yaml:2: a config may not contain the character 0x0"),
        ("- a\n- b\n", "run.yaml:1: a config should be keys and values"),
        ("seed: 1\n? [a, b]\n: 1\n", "run.yaml:2: a key should be one word"),
        ("seed: 1\nmodel: !!set {a, b}\n", "run.yaml:2: model: the tag "),
        ("model: {a: !!int five}\n", "run.yaml:1: model.a: 'five' is not a valid int"),
        ("model: &a\n  b: *a\n", "run.yaml:1: is nested too deeply"),
        ("data:\n  <<: {a: 1}\n", "run.yaml:2: data: merge keys (<<) are not supported"),
        ("model: " + "[" * 5000, "run.yaml:1: is nested too deeply"),
        (b"seed: 1\r\nname: caf\xe9\r\n", "run.yaml:2: byte 0xe9 is not UTF-8"),
        ("seed: 1".encode("utf-16"), "run.yaml:1: byte 0xff is not UTF-8"),
        (b"#" * (1 << 20) + b"\nseed: 1", "run.yaml: is larger than 1 MiB"),
    ],
)
def test_invalid_yaml_is_refused_with_its_line(
    lines: Lines, content: str | bytes, line: str
) -> None:
    (only,) = lines(content)
    assert only.startswith(line)


def test_a_missing_file_is_named_with_the_nearest_existing_file(write: Write) -> None:
    write("", "gpt.yaml")
    with pytest.raises(ConfigError, match=r"^gtp\.yaml: no such file; did you mean gpt\.yaml\?$"):
        file_layer("gtp.yaml")
    with pytest.raises(ConfigError, match=r"^no/where\.yaml: no such file$"):
        file_layer("no/where.yaml")
