"""The examples of docs/config.md match the behavior."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.config import ConfigError, file_layer, flag_layer, override_layer, resolve
from tests.support.pages import code_blocks

PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text(encoding="utf-8")


def test_the_values_on_the_page_are_read_as_it_says(write: Callable[..., str]) -> None:
    (example,) = code_blocks(PAGE, "yaml")
    job = resolve([file_layer(write(example))]).job
    assert (job.time_seconds, job.account, job.env) == (5400, "0123", {"NCCL_VERSION": "2.10"})


def test_the_errors_on_the_page_are_printed_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/gpt.yaml").write_text("seed: 1\ntrain:\n  lrr: 3e-4\n  steps: many\n")
    layers = [
        file_layer("configs/gpt.yaml"),
        override_layer(["optim.schedule=cosin"]),
        flag_layer({"job.gpus": (0, "--gpus")}),
    ]
    with pytest.raises(ConfigError) as caught:
        resolve(layers)
    assert f"{caught.value}\n" in code_blocks(PAGE, "text")
