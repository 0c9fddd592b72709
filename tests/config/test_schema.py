"""The schema: defaults, names, time limits, and a round trip through YAML."""

from __future__ import annotations

import copy
import pickle
import re
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hpcrun.config import (
    Config,
    ConfigError,
    Job,
    Layer,
    ModelOptions,
    check_name,
    flag_layer,
    json_schema,
    override_layer,
    resolve,
    to_yaml,
)
from hpcrun.config.fields import Section
from hpcrun.config.reader import read_yaml

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def test_every_key_has_a_one_line_description() -> None:
    parts = [part for _, part in Config() if isinstance(part, Section)]
    sections: list[type[Section]] = [Config, *(type(part) for part in parts)]
    keys = [item for section in sections for item in section.model_fields.items()]
    assert len(keys) > 70
    for name, field in keys:
        assert re.fullmatch(r"[^\n]{4,90}\.", field.description or ""), name


def test_the_json_schema_knows_limits_choices_and_strictness() -> None:
    schema = json_schema()
    train = schema["$defs"]["Train"]
    assert train["additionalProperties"] is False
    assert train["properties"]["steps"]["minimum"] == 1
    assert train["properties"]["deterministic"]["enum"] == [True, False, "warn", "strict"]
    assert train["properties"]["parallel"]["enum"] == ["auto", "single", "dp", "ddp", "fsdp"]
    job = schema["$defs"]["Job"]["properties"]
    assert job["launcher"]["enum"] == ["torchrun", "accelerate", "none", None]
    count, typed = job["gpus"]["anyOf"]
    assert count["minimum"] == 1
    assert re.fullmatch(typed["pattern"], "gpu:a100:4")
    assert not re.fullmatch(typed["pattern"], "a100")


def test_launcher_none_is_one_task_per_node() -> None:
    job = resolve([override_layer(["job.launcher=none", "job.gpus=4", "command=[a]"])]).job
    assert (job.launcher, job.tasks_on_node, job.gpus) == (None, 1, 4)
    assert resolve([override_layer(["job.launcher=none", "job.tasks_per_node=1", "command=[a]"])])
    with pytest.raises(ConfigError, match=r"launcher: none means one task per node; remove"):
        resolve([override_layer(["job.launcher=none", "job.tasks_per_node=4", "command=[a]"])])
    with pytest.raises(
        ConfigError, match="torchrun, accelerate or none, not 'nonee'; did you mean"
    ):
        resolve([override_layer(["job.launcher=nonee", "command=[a]"])])


@pytest.mark.parametrize(
    ("gpus", "count", "kind"),
    [
        ("a100:4", 4, "a100"),
        ("gpu:a100:4", 4, "a100"),
        ("1g.10gb:2", 2, "1g.10gb"),
    ],
)
def test_gpus_may_be_given_with_their_type(gpus: str, count: int, kind: str | None) -> None:
    by_override = resolve([override_layer([f"job.gpus={gpus}"])]).job
    by_flag = resolve([flag_layer({"job.gpus": (gpus, "--gpus")})]).job
    assert (by_override.gpus, by_override.gpu_type) == (count, kind)
    assert by_flag == by_override


def test_a_later_layer_may_replace_only_type_or_count() -> None:
    profile = Layer({"job": {"gpu_type": "a100"}})
    assert resolve([profile, override_layer(["job.gpus=2"])]).job.gpu_type == "a100"
    assert resolve([profile, override_layer(["job.gpus=h100:2"])]).job.gpu_type == "h100"
    assert resolve([override_layer(["job.gpus=h100:2", "job.gpu_type=null"])]).job.gpu_type is None


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (["job.gpus=a100:0"], "should be at least 1, not 0"),
        (["job.gpus=a100:2", "job.gpu_request=none"], "omit the type"),
    ],
)
def test_an_invalid_request_for_gpus_is_refused(override: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        resolve([override_layer(override)])
    assert str(caught.value).startswith("command line: job.gpu")


@pytest.mark.parametrize(
    ("time", "seconds", "normal"),
    [
        (90, 5400, "01:30:00"),
        ("0:45", 45, "00:00:45"),
        ("100:00", 6000, "01:40:00"),
        ("24:00:00", 86400, "1-00:00:00"),
        ("2-12", 216000, "2-12:00:00"),
        ("1-02:03:04", 93784, "1-02:03:04"),
    ],
)
def test_a_time_limit_means_what_it_means_to_sbatch(time: Any, seconds: int, normal: str) -> None:
    job = Job(time=time)
    assert (job.time_seconds, job.time) == (seconds, normal)
    assert Job(time=normal) == job


@pytest.mark.parametrize(
    "time", ["", ":", "1:", "1-", "-1", "1:2:3:4", "1d", "٣", True, 1.5, "0:0", "9" * 5000]
)
def test_an_invalid_time_limit_is_refused(time: Any) -> None:
    with pytest.raises(ValidationError):
        Job(time=time)


@pytest.mark.parametrize("name", ["a", "7", "gpt-2_x.y+z=1@home", "größe", "実験１", "x" * 100])
def test_a_plain_name_in_any_script_is_accepted(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("my run", "my-run"),
        ("$(rm -rf x)", "rm--rf-x"),
        ('it\'s "x"', "it-s-x"),
        ("../up", "up"),
        (".hidden", "hidden"),
        ("a\nb", "a-b"),
        ("🚀", "run-1"),
        ("", "run-1"),
    ],
)
def test_an_invalid_name_is_answered_with_a_valid_name(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([override_layer([f"name={name}"])])
    line = str(caught.value)
    assert line.startswith("command line: name: should be letters, digits and . _ - + = @ with")
    assert line.endswith(f"; try {remedy}")
    assert check_name(remedy) == remedy


@given(st.text())
def test_an_accepted_name_is_one_harmless_path_component(name: str) -> None:
    try:
        accepted = check_name(name)
    except ValueError:
        return
    assert accepted[0].isalnum()
    assert not set(accepted) & (set(string.whitespace) | set("/\\;$`'\"()<>|&*?[]{}!#~%^:,\0"))
    assert accepted.isprintable()
    assert len(accepted.encode()) <= 200
    assert check_name(accepted) == accepted


@given(model=st.dictionaries(TEXT, PLAIN, max_size=4))
@settings(max_examples=150)
def test_any_plain_value_of_a_task_survives_writing_and_reading(model: dict[str, Any]) -> None:
    config = resolve([Layer({"model": model})])
    values, _ = read_yaml(to_yaml(config), str)
    assert values["model"] == model
    assert resolve([Layer(values)]) == config


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_a_copy_is_equal_and_immutable(copied: Any) -> None:
    config = Config.model_validate({"model": {"self": 1, "a b": [2]}, "job": {"setup": ["x"]}})
    again = copied(config)
    assert again == config
    assert again.model.own == {"self": 1, "a b": [2]}
    assert again.model_dump_json() == config.model_dump_json()
    with pytest.raises(ValidationError, match="frozen"):
        del again.seed
    assert config != Config()
    assert ModelOptions(layers=2) != ModelOptions(layers=3)
    assert hash(config.checkpoint) == hash(again.checkpoint)
