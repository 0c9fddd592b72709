"""Fixtures of the config tests: write a config file, and return the lines of its refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.config import ConfigError, file_layer, override_layer, resolve


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Write a file into an empty working directory and return its name, as in messages."""
    monkeypatch.chdir(tmp_path)

    def write_file(content: str | bytes, name: str = "run.yaml") -> str:
        data = content.encode() if isinstance(content, str) else content
        Path(name).write_bytes(data)
        return name

    return write_file


@pytest.fixture
def lines(write: Callable[..., str]) -> Callable[..., list[str]]:
    """Return the lines that refuse a file with overrides."""

    def refused(content: str | bytes, *overrides: str, name: str = "run.yaml") -> list[str]:
        with pytest.raises(ConfigError) as caught:
            resolve([file_layer(write(content, name)), override_layer(overrides)])
        return str(caught.value).splitlines()

    return refused


@pytest.fixture
def override_lines() -> Callable[..., list[str]]:
    """Return the lines that refuse overrides without a file."""

    def refused(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            resolve([override_layer(overrides)])
        return str(caught.value).splitlines()

    return refused
