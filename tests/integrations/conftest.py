"""Fixtures for trainings with frameworks that start several times in one process."""

import os
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hpcrun.ranks.signals import StopFlag
from hpcrun.train.own_loop.session import ENDED


@pytest.fixture
def again(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes this rank like a new process: no signal, other random numbers."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    # This process does not end: the workers of the next start must live.
    monkeypatch.setattr("hpcrun.train.own_loop.session.end_helpers", lambda: None)

    def restart() -> None:
        for thread in threading.enumerate():
            if thread.name.startswith("commit"):  # a process waits for it at its exit
                thread.join()
        monkeypatch.setattr("hpcrun.train.own_loop.session.STOP", flag := StopFlag())
        if "hpcrun.integrations.transformers" in sys.modules:
            monkeypatch.setattr("hpcrun.integrations.transformers.STOP", flag)
        ENDED.clear()
        seed = int.from_bytes(os.urandom(4), "big")
        random.seed(seed)
        torch.manual_seed(seed)

    return restart


@pytest.fixture
def attempt(again: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that trains as in a new process, and returns its result, or the exit code."""

    def train(training: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        again()
        try:
            return training(*arguments, **options)
        except SystemExit as ended:
            return ended.code
        except ZeroDivisionError:
            again()
            return 1

    return train
