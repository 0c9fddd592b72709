"""The task's keys get the same checks as the keys of hpcrun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field

from hpcrun.config import (
    ConfigError,
    file_layer,
    load_resolved,
    locate,
    resolve,
    to_yaml,
    with_task_options,
)

Write = Callable[..., str]


class ModelKeys(BaseModel):
    """Model options of a task; extra keys are neither forbidden nor allowed."""

    width: int = Field(64, ge=1)
    depth: int
    rates: tuple[float, ...] = (0.1,)


class DataKeys(BaseModel):
    """Data options of a task."""

    model_config = ConfigDict(extra="forbid")

    path: Path = Path("corpus.h5")
    workers: int = 7


def refused(write: Write, content: str) -> list[str]:
    layers = [file_layer(write(content))]
    config = resolve(layers)
    with pytest.raises(ConfigError) as caught:
        with_task_options(config, (ModelKeys, DataKeys), locate(layers))
    return str(caught.value).splitlines()


def test_a_tasks_own_keys_are_checked_with_place(write: Write) -> None:
    content = "data:\n  pth: x\n  worker: 2\nmodel:\n  depth: x\n  widht: 3\n  lr: 1\n"
    assert refused(write, content) == [
        "run.yaml:2: data.pth: unknown key; did you mean data.path?",
        "run.yaml:3: data.worker: unknown key; did you mean data.workers?",
        "run.yaml:5: model.depth: should be a whole number, not 'x'",
        "run.yaml:6: model.widht: unknown key; did you mean model.width?",
        "run.yaml:7: model.lr: unknown key; did you mean train.lr?",
    ]


def test_a_missing_key_is_reported_at_its_section(write: Write) -> None:
    assert refused(write, "seed: 1\nmodel:\n  width: 3\n") == [
        "run.yaml:2: model.depth: is missing"
    ]
    assert refused(write, "seed: 1\n") == ["defaults: model.depth: is missing"]


def test_a_run_directory_stores_the_completed_config(write: Write, tmp_path: Path) -> None:
    layers = [file_layer(write("model: {depth: 2}\ndata: {workers: 1}\ntrain: {lr: 1}\n"))]
    config = with_task_options(resolve(layers), (ModelKeys, DataKeys), locate(layers))
    assert config.model.own == {"width": 64, "depth": 2, "rates": [0.1]}
    assert config.data.own == {"path": "corpus.h5"}
    assert config.data.workers == 1
    assert config.train.lr == 1
    kept = tmp_path / "config.yaml"
    kept.write_text(to_yaml(config))
    assert load_resolved(kept) == config
