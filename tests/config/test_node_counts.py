"""A range of nodes in the config: its values, and what contradicts it."""

import pytest

from hpcrun.config import (
    Config,
    ConfigError,
    file_layer,
    override_layer,
    resolve,
    to_yaml,
)


def resolved(*overrides: str) -> Config:
    return resolve([override_layer([*overrides])])


@pytest.mark.parametrize(
    ("written", "value", "least", "most"),
    [("2-4", "2-4", 2, 4), (" 2 - 4", "2-4", 2, 4), ("3-3", 3, 3, 3), ("'5'", 5, 5, 5)],
)
def test_a_range_is_kept_in_one_form(tmp_path, written, value, least, most):
    path = tmp_path / "run.yaml"
    path.write_text(f"job:\n  nodes: {written}\n")
    config = resolve([file_layer(path)])
    job = config.job
    assert (job.nodes, job.min_nodes, job.max_nodes) == (value, least, most)
    assert (job.elastic, job.world_size) == (least < most, most)
    path.write_text(to_yaml(config))
    assert resolve([file_layer(path)]) == config


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("0-2", "should be at least 1, not '0-2'"),
        ("4-2", "ends before it begins: '4-2'; write 2-4"),
        ("2-", "should be a whole number, or a range such as 2-4, not '2-'"),
        ("2,4", "should be a whole number, or a range such as 2-4, not '2,4'"),
        ("2-4:2", "should be a whole number, or a range such as 2-4, not '2-4:2'"),
        ("1.5", "should be a whole number, or a range such as 2-4, not 1.5"),
        ("true", "should be a whole number, or a range such as 2-4, not true"),
        ("[2, 4]", "should be a whole number, or a range such as 2-4, not [2, 4]"),
        ("null", "may not be null; give it a value or omit the key"),
        ("1-9999999", "should be at most 1000000, not '1-9999999'"),
    ],
)
def test_another_form_of_nodes_is_refused(written, text):
    with pytest.raises(ConfigError) as refused:
        resolved(f"job.nodes={written}")
    assert str(refused.value) == f"command line: job.nodes: {text}"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["job.nodes=2-4", "job.gpus=2", "train.batch_size=13", "train.accumulation=2"],
            "13 samples are too few for 4 x 2 ranks x 2 micro-batches, each with at least one; use 16 "
            "or more, or job.nodes=2-3",
        ),
        (
            ["job.nodes=3-4", "job.gpus=2", "train.batch_size=6", "train.micro_batch=4"],
            "6 samples are too few for 4 x 2 ranks x 1 micro-batches, each with at least one; use 8 or "
            "more, or job.nodes=3",
        ),
        (
            ["job.nodes=3-4", "train.batch_size=2"],
            "2 samples are too few for 4 x 1 ranks x 1 micro-batches, each with at least one; use 4 or "
            "more",
        ),
        (
            ["job.nodes=2-4", "train.deterministic=strict"],
            "strict refuses other bits on resume, and",
        ),
        (["job.nodes=1-4", "train.parallel=fsdp", "fsdp.shard=hybrid"], "hybrid keeps a copy on"),
        (
            ["job.nodes=1-4", "job.executor=debug"],
            "debug runs one rank in one process, but 1-4 x 1",
        ),
        (["job.nodes=1-4", "train.parallel=single"], "single is for one rank, but 1-4 x 1 ranks"),
    ],
)
def test_a_range_that_contradicts_another_key_is_refused(overrides, text):
    with pytest.raises(ConfigError) as refused:
        resolved(*overrides)
    (line,) = str(refused.value).splitlines()
    assert line.split(": ", 2)[2].startswith(text)


@pytest.mark.parametrize(
    "overrides",
    [
        ["job.nodes=3-4", "train.batch_size=7"],
        ["job.nodes=2-4", "train.parallel=fsdp", "fsdp.shard=hybrid"],
        ["job.nodes=2-4", "train.batch_size=1", "command=[./a]", "train.deterministic=strict"],
    ],
)
def test_a_range_accepts_an_uneven_division_and_a_script(overrides):
    assert resolved(*overrides).job.elastic
