"""Every wrong key and value gets a message with its place and a remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrun.config import (
    Config,
    ConfigError,
    Layer,
    file_layer,
    flag_layer,
    locate,
    override_layer,
    resolve,
)
from hpcrun.config.schema import known_keys

Lines = Callable[..., list[str]]
Write = Callable[..., str]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("sed: 1", "run.yaml:1: sed: unknown key; did you mean seed?"),
        ("trian:\n  lr: 1", "run.yaml:1: trian: unknown key; did you mean train?"),
        ("train:\n  LR: 1", "run.yaml:2: train.LR: unknown key; did you mean train.lr?"),
        ("train: {dtype: x}", "run.yaml:1: train.dtype: unknown key; did you mean amp.dtype?"),
        ("checkpoints: 1", "run.yaml:1: checkpoints: unknown key; did you mean checkpoint?"),
        (
            "train:\n\n  learning_rate: 1",
            "run.yaml:3: train.learning_rate: unknown key; did you mean train.lr?",
        ),
        (
            "train: {compression: fp16}",
            "run.yaml:1: train.compression: unknown key; did you mean train.comm_hook?",
        ),
        (
            "train: {num_epochs: 3}",
            "run.yaml:1: train.num_epochs: unknown key; set train.steps instead",
        ),
        (
            "train.lr: 1",
            "run.yaml:1: train.lr: unknown key; write it as `lr` under `train:`",
        ),
        (
            "checkpoint: {zzz: 1}",
            "run.yaml:1: checkpoint.zzz: unknown key; `hpcrun config schema` lists all keys",
        ),
    ],
)
def test_a_misspelt_key_is_answered_with_the_nearest(lines: Lines, content: str, line: str) -> None:
    (only,) = lines(content)
    assert only.startswith(line)


@pytest.mark.parametrize(
    "key",
    # Without keys below data: unknown keys there belong to the task, which checks them.
    [
        key
        for key in known_keys(Config)
        if len(key.split(".")[-1]) > 4 and not key.startswith("data.")
    ],
)
def test_a_typing_error_in_any_key_suggests_that_key(key: str) -> None:
    section, _, leaf = key.rpartition(".")
    slip = f"{section}.{leaf[0]}{leaf[2]}{leaf[1]}{leaf[3:]}".lstrip(".")
    if slip == key:
        slip = f"{key}x"
    with pytest.raises(ConfigError) as caught:
        resolve([flag_layer({slip: (1, "--flag")})])
    assert str(caught.value).startswith(f"--flag: {slip}: unknown key; did you mean {key}")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("train: {steps: abc}", "train.steps: should be a whole number, not 'abc'"),
        ("train: {steps: 1.5}", "train.steps: should be a whole number, not 1.5"),
        ("train: {steps: true}", "train.steps: should be a number, not true"),
        ("train: {steps: {a: 1}}", 'train.steps: should be a whole number, not {"a": 1}'),
        (
            "train: {deterministic: warm}",
            "train.deterministic: should be true, false, warn or strict, not 'warm'",
        ),
        ("train: {lr: fast}", "train.lr: should be a number, not 'fast'"),
        ("train: {lr: .nan}", "train.lr: should be a finite number, not NaN"),
        ("train: {lr: 0}", "train.lr: should be more than 0, not 0"),
        ("train: {steps: 0}", "train.steps: should be at least 1, not 0"),
        ("train: {steps: null}", "train.steps: may not be null; give it a value or omit the key"),
        ("train: 5", "train: should be keys and values, not 5"),
        ("job: {cpu: maybe}", "job.cpu: should be true or false, not 'maybe'"),
        ("job: {env: [A]}", "job.env: should be keys and values, not ***"),
        ("job: {env: {A: [1]}}", "job.env.A: should be text, in quotes if it looks like"),
        ("job: {env: {A-B: 1}}", "job.env.A-B: is not a valid name of an environment variable"),
        ("job: {env: {UID: 1}}", "job.env.UID: is a variable that bash keeps read-only; remove it"),
        ('job: {env: {A: "a\\0b"}}', "job.env.A: may not contain a NUL"),
        ("job: {setup: module load x}", "job.setup: should be a list, such as [a, b], not 'module"),
        ("job: {sbatch_args: [x]}", "job.sbatch_args.0: should be one option such as --comment"),
        ('job: {srun_args: ["-x\\ny"]}', "job.srun_args.0: should be one option such as --comment"),
        ("job: {interface: auto}", "job.interface: auto is no longer a choice; name the interf"),
        ("job: {partition: a b}", "job.partition: may not contain ' ': 'a b'"),
        ("job: {partition: ''}", "job.partition: is empty; omit the key, or write null"),
        ("job: {mem: lots}", "job.mem: should be a size such as 64G or 512M, not 'lots'"),
        ("job: {executor: slrum}", "job.executor: should be auto, slurm, local or debug, not"),
        ("job: {nodes: -1}", "job.nodes: should be at least 1, not -1"),
        ("job: {time: soon}", "job.time: should be a time limit, not 'soon'; write HH:MM:SS"),
        ("job: {time: 0}", "job.time: should be longer than zero"),
        ("amp: {dtype: bfloat16}", "amp.dtype: should be fp32, tf32, bf16 or fp16, not 'bfloat16'"),
        ("optim: {betas: 0.9}", "optim.betas: should be a list, such as [a, b], not 0.9"),
        ("optim: {betas: [0.9]}", "optim.betas.1: is missing"),
        ("optim: {betas: [0.9, 0.9, 1]}", "optim.betas: should have 2 values, not 3"),
        ("seed: -1", "seed: should be at least 0, not -1"),
        ("seed: 9223372036854775808", "seed: should be less than 9223372036854775808"),
        ("task: my task", "task: should be the name of a built-in task, such as language-model"),
        (
            "name: [a]",
            "name: should be text, in quotes if it looks like a number, a date or a boolean",
        ),
    ],
)
def test_a_wrong_value_is_answered_with_the_expected_kind(
    lines: Lines, content: str, text: str
) -> None:
    (only,) = lines(content)
    assert only.startswith(f"run.yaml:1: {text}")


def test_every_problem_is_reported_in_the_order_of_the_lines(lines: Lines) -> None:
    content = (
        "train:\n  steps: x\n  lrr: 1\nsed: 1\njob:\n  setup:\n    - ok\n    - [no]\n"
        "  nodes: 0\namp:\n  dtype: fp8\ncheckpoint: 3\n"
    )
    places = [line.split(": ")[:2] for line in lines(content)]
    assert places == [
        ["run.yaml:2", "train.steps"],
        ["run.yaml:3", "train.lrr"],
        ["run.yaml:4", "sed"],
        ["run.yaml:8", "job.setup.1"],
        ["run.yaml:9", "job.nodes"],
        ["run.yaml:11", "amp.dtype"],
        ["run.yaml:12", "checkpoint"],
    ]


def test_a_batch_too_small_for_the_ranks_names_the_minimum(
    lines: Lines,
) -> None:
    content = "train:\n  accumulation: 2\n  batch_size: 11\njob:\n  nodes: 2\n  gpus: 3\n"
    assert lines(content) == [
        "run.yaml:3: train.batch_size: 11 samples are too few for 2 x 3 ranks x 2 micro-batches, "
        "each with at least one; use 12 or more"
    ]
    resolve([override_layer(["train.batch_size=13", "train.accumulation=2", "job.nodes=6"])])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            "train: {micro_batch: 4, accumulation: 2}",
            "train.accumulation: follows from train.micro_batch",
        ),
        (
            "{train: {steps: 9}, optim: {schedule: wsd, warmup_steps: 4, decay_steps: 6}}",
            "optim.decay_steps: warm-up and decay take 10 steps, but train.steps is 9",
        ),
    ],
)
def test_contradicting_keys_of_training_are_refused(lines: Lines, content: str, text: str) -> None:
    (only,) = lines(content)
    assert only.startswith(f"run.yaml:1: {text}")


def test_the_place_of_a_key_is_of_its_final_value(write: Write) -> None:
    path = write("train:\n  lr: 1\n  steps: 2\njob:\n  setup:\n    - a\n    - b\n")
    where = locate([file_layer(path), override_layer(["train.lr=2", "job.setup=[c]"])])
    assert where("train.lr") == "command line"
    assert where("train.steps") == "run.yaml:3"
    assert where("train") == "run.yaml:1"
    assert where("job.setup.0") == "command line"
    assert where("job.setup.1") == "command line"
    assert where("job.missing") == "run.yaml:4"
    assert where("amp.dtype") == "defaults"


@given(st.text(min_size=1), st.text())
def test_a_refused_key_never_breaks_its_line(key: str, value: str) -> None:
    layer = Layer({"job": {"env": {"1" + key: value}}}, {f"job.env.1{key}": "here"})
    with pytest.raises(ConfigError) as caught:
        resolve([layer])
    assert len(str(caught.value).splitlines()) == len(caught.value.problems)


def test_a_contradiction_has_the_place_of_a_given_key(lines: Lines) -> None:
    (line,) = lines("train: {steps: 5}", "train.lr_scaling=sqrt")
    assert line.startswith("command line: train.lr_base_batch: lr_scaling=sqrt needs")
