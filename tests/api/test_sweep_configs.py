"""The configs of a sweep: equal to those of single runs, or refused with one line."""

import json
from pathlib import Path

import pytest

from hpcrun.api.submission.choose_config import SubmitRequest, choose_config, config_layers
from hpcrun.api.sweeps.configs import Element, element_configs
from hpcrun.api.sweeps.request import SweepRequest, expand, read_axes
from hpcrun.config import load_resolved, override_layer, to_yaml
from hpcrun.errors import UserError


def elements(
    *axes: str, command: tuple[str, ...] = (), overrides: tuple[str, ...] = ()
) -> list[Element]:
    request = SweepRequest(read_axes(axes))
    given = SubmitRequest(command=command, overrides=override_layer(overrides))
    return element_configs(given, request, expand(request), config_layers(given))


@pytest.mark.parametrize(
    "axes",
    [
        ("train.lr=1e-4,3e-5,1e22", "seed=0:3"),
        ("optim.betas=[0.9,0.95],[0.8,0.9]", "train.compile=true,false"),
        ("job.setup=['x\ny'],['a: b'],[]", "seed=0,1"),
        ("model.width=64,128",),
        ("job.time=1:00:00,30", "train.batch_size=32,64"),
    ],
)
def test_an_element_has_the_config_of_a_single_run(tmp_path: Path, axes: tuple[str, ...]) -> None:
    overrides = ("name=one",)
    found = elements(*axes, overrides=overrides)
    for one in found:
        single = choose_config(SubmitRequest(overrides=override_layer(_overrides(one, overrides))))
        assert one.config == single
        (tmp_path / "config.yaml").write_text(one.text)
        assert load_resolved(tmp_path / "config.yaml") == single
        assert one.text == to_yaml(single)


def _overrides(one: Element, more: tuple[str, ...]) -> list[str]:
    words = (
        value if isinstance(value, str) else json.dumps(value) for value in one.values.values()
    )
    return [*more, *(f"{key}={word}" for key, word in zip(one.values, words, strict=True))]


@pytest.mark.parametrize(
    ("axes", "line"),
    [
        (["trian.lr=1,2"], "--sweep: trian: unknown key"),
        (["task=language-model,examples.bdh:BDHTask"], "task: needs a config for all tasks"),
        (["train.lr=a,b"], "train.lr: should be a number, not 'a'"),
        (["optim.momentum=0.8,0.7"], "optim.momentum: has no effect with optim.name=adamw"),
        (["train.lr=1e-3,1.0e-3"], "is given twice"),
        (["name=a,b"], "name: is the same for all runs"),
        (["train=1"], "train: is a section"),
        (["job.env.TOKEN=a,b"], "job.env.TOKEN: is masked in all tables"),
        (["train.batch_size=32,1"], "samples are too few"),
        (["model.width=3,64"], "model.width: should be a multiple"),
    ],
)
def test_a_wrong_sweep_is_one_line(axes: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line) as refused:
        elements(*axes)
    assert "\n" not in str(refused.value)


def test_a_key_that_all_runs_have_already_is_refused() -> None:
    with pytest.raises(UserError, match=r"--sweep: seed: is also given for all runs"):
        elements("seed=0,1", overrides=("seed=3",))


def test_a_command_gets_the_values_as_they_were_written() -> None:
    found = elements("lr=1e-4,3e-4", "seed=0,1", command=("python", "t.py", "--lr={lr}", "{seed}"))
    assert [one.config.command for one in found] == [
        ["python", "t.py", f"--lr={lr}", seed] for lr in ("1e-4", "3e-4") for seed in "01"
    ]
    assert all(one.text == to_yaml(one.config) for one in found)


def test_a_key_that_the_command_does_not_use_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"wd: has no effect: the command does not use it; write \{wd\}"
    ):
        elements("lr=1,2", "wd=0,1", command=("python", "t.py", "{lr}"))


def test_the_resources_of_a_command_may_differ() -> None:
    found = elements("job.gpus=1,2", command=("python", "t.py"))
    assert [one.config.job.gpus for one in found] == [1, 2]
