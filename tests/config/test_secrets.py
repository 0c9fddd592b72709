"""The URL of a webhook appears on no screen and in no shared file."""

from __future__ import annotations

import contextlib

import pytest
import yaml

from hpcrun.cli.main import guarded
from hpcrun.config import (
    Config,
    ConfigError,
    flag_layer,
    masked,
    masked_values,
    masked_words,
    override_layer,
    resolve,
    script_yaml,
    to_yaml,
)

URL = "https://ann:pass@hooks.example.org:8443/T0/B1/s3cret?token=1"
SHOWN = "***"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URL, SHOWN),
        (f"curl -d @- '{URL}' | cat", f"curl -d @- '{SHOWN}' | cat"),
        (f"{URL}: refused", f"{SHOWN}: refused"),
        ("mail ann", "mail ann"),
    ],
)
def test_no_text_shows_a_url(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_no_text_of_a_config_shows_the_url() -> None:
    config = resolve([override_layer([f"watch.notify=curl {URL}"])])
    assert "s3cret" in to_yaml(config)
    assert "s3cret" not in to_yaml(config, mask=True)
    assert masked_values(config.model_dump())["watch"]["notify"] == SHOWN
    assert masked_values({"watch": None, "job": None}) == {"watch": None, "job": None}


def test_no_config_text_for_a_screen_holds_a_job_variable() -> None:
    config = resolve([override_layer(["job.env.HF_TOKEN=s3cret", "job.nodes=2"])])
    assert config.job.env == {"HF_TOKEN": "s3cret"}
    assert "s3cret" in to_yaml(config)
    assert "s3cret" not in to_yaml(config, mask=True)
    assert masked_values(config.model_dump())["job"]["env"] == {"HF_TOKEN": "***"}
    assert masked_values({"job": {"env": "s3cret"}}) == {"job": {"env": "***"}}
    with pytest.raises(ConfigError, match=r"HF_TOKEN: is a masked value"):
        resolve([override_layer(["job.env.HF_TOKEN=***"])])


def test_the_recorded_command_line_holds_no_url() -> None:
    words = ["hpcrun", "submit", f"watch.notify={URL}", f"data.source={URL}"]
    assert masked_words(words) == ["hpcrun", "submit", f"watch.notify={SHOWN}", words[3]]


@pytest.mark.parametrize(
    "word",
    ["job.env.A=s3cret", "job.env={A: s3cret}", "job={env: {A: s3cret}}", "job . env.A =s3\ncret"],
)
def test_the_recorded_command_line_holds_no_variable_of_the_job(word: str) -> None:
    (shown,) = masked_words([word])
    assert shown == f"{word.partition('=')[0]}=***"
    assert masked_words(["job.environment=x", "job.time=1"]) == ["job.environment=x", "job.time=1"]


def test_a_refused_url_is_not_shown() -> None:
    with pytest.raises(ConfigError, match="is a URL; give a command") as caught:
        resolve([override_layer([f"watch.notify={URL}"])])
    assert "watch.notify" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_program_text_is_masked_and_a_config_is_not() -> None:
    text = "import hpcrun; hpcrun.submit(overrides={'job.env.A': 'secret'})"
    assert masked_words(["python", "-c", text]) == ["python", "-c", "***"]
    assert masked_words(["hpcrun", "submit", "-c", "gpt.yaml"])[-1] == "gpt.yaml"
    assert masked_words(["watch={notify: https://x.org/secret}"]) == ["watch=***"]


def test_a_script_shows_its_sections_and_what_differs() -> None:
    job = {"env": {"TOKEN": "secret"}, "gpus": 2}
    text = script_yaml(
        Config(command=["./a"], job=job, train={"lr": 1.0}, watch={"notify": "post"})
    )
    shown = yaml.safe_load(text)
    assert [*shown] == ["name", "command", "job", "restarts", "train", "watch"]
    assert (shown["train"], shown["watch"]) == ({"lr": 1.0}, {"notify": "***"})
    assert (shown["job"]["gpus"], shown["job"]["env"]) == (2, {"TOKEN": "***"})
    assert "secret" not in text
    assert text.endswith("checkpoint\n")


LAYERS = [
    "job.env=s3cret",
    "job.env=[s3cret]",
    "job.env={X: [s3cret]}",
    "job.env={X: {s3cret: 1}}",
    "job.env.X.Y=s3cret",
    "job.env.X.s3cret=1",
    "job.env={'HF_TOKEN=s3cret': x}",
    "job.env={X: !s3cret 1}",
    "job.env={X: *s3cret}",
    "job.env={X: !s3cret!t 1}",
    "job.env={X: {s3cret: 1, s3cret: 2}}",
    "job={env: s3cret}",
    "job=s3cret",
    "job=[s3cret]",
    "job.env.HF_TOKEN:s3cret",
    "job.env.=s3cret",
    "job..env.X=s3cret",
    "watch={notify: {a: s3cret}}",
]


@pytest.mark.parametrize("override", LAYERS)
def test_no_refusal_shows_a_variable_of_the_job(override: str) -> None:
    # A flag of the section does not replace a value that is no section.
    with pytest.raises(ConfigError) as caught:
        resolve([override_layer([override]), flag_layer({"job.cpu": (True, "--cpu")})])
    assert "s3cret" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", ["s3cret\0", "s3cret\udcff", ["s3cret"], {"s3cret": 1}, None])
def test_no_refusal_of_a_program_shows_a_variable(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve([flag_layer({"job.env": ({"HF_TOKEN": value}, "hpcrun.submit")})])
    assert "s3cret" not in str(caught.value)
    assert "job.env.HF_TOKEN" in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["config", "job.env.X=s3cret9"],
        ["resume", "a", "job.env.X=s3cret9", "job.env.X=s3cret9"],
        ["status", "job.env={X: s3cret9}"],
        ["job.env.X=s3cret9"],
        ["doctor", "job.env.X=s3cret9"],
        ["submit", "--nodes", "job.env.X=s3cret9"],
    ],
)
def test_no_command_repeats_a_variable_of_its_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["hpcrun", *arguments])
    with contextlib.suppress(SystemExit):
        guarded(arguments)
    printed = capsys.readouterr()
    assert "s3cret" not in printed.out + printed.err
    assert printed.err
