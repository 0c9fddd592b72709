"""The state of a user's function: what changes between steps is kept, and a configuration is not."""

import argparse
import dataclasses
import functools
import logging
import pathlib
import random
import sys
import threading
import types
from collections import Counter, namedtuple

import numpy as np
import pytest
import torch

from hpcrun.checkpoint.state.assignments import assigned_through
from hpcrun.checkpoint.state.object_state import CONSTANT, ObjectStates

STATES = ObjectStates(frozenset(), torch.device("cpu"))
Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Options:
    epochs: int = 10
    out: pathlib.Path = pathlib.Path("old")
    nested: dict = dataclasses.field(default_factory=lambda: {"lr": 0.1, "betas": (0.9, 0.99)})


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    errors: torch.Tensor
    lr: float = 0.1


class Recorder:
    """As the client of a logging service."""

    def __init__(self):
        self.lock, self.file, self.thread = threading.Lock(), sys.stderr, threading.Thread()


def reading(*values):
    def hook(_, bucket):
        return bucket, values

    return hook


def carried(make):
    """Carry the state of a function to one that the program makes again; return the second."""
    saved, live = STATES.take(make(0), "hook"), make(1)
    STATES.put(live, saved)
    return live


@pytest.mark.parametrize(
    "value",
    [
        *(logging.getLogger("a"), logging.StreamHandler(), sys.stderr, Recorder(), Options()),
        *(argparse.Namespace(epochs=10), types.SimpleNamespace(a=1), {"lr": 0.1}, [1, 2], {1, 2}),
        *(frozenset({1}), Pair(1, 2), Counter("a"), np.float32(3), 3j, range(3), ..., list[int]),
        *({torch.float32: 1}, pathlib.Path("a"), functools.partial(print, 1), torch.float16),
    ],
)
def test_a_value_that_no_code_changes_is_no_state(value):
    assert STATES.take(reading(value), "hook") == CONSTANT


def test_the_configuration_of_this_run_stays():
    first, second = ({"epochs": one, "out": f"run-{one}"} for one in (10, 20))
    options = [argparse.Namespace(epochs=one, names=["a", one]) for one in (10, 20)]
    errors = [{"w": torch.full((2,), float(one))} for one in (1, 2)]
    carried(lambda n: reading((first, second)[n], options[n], errors[n]))
    assert (second["epochs"], options[1].epochs, options[1].names) == (20, 20, ["a", 20])
    assert errors[1]["w"].tolist() == [1.0, 1.0]


class Steps:
    """Its own methods change it."""

    def __init__(self, calls, scale):
        self.calls, self.scale, self.seen = calls, scale, set()

    def count(self):
        bump(self)
        self.seen.add(self.calls)


def bump(steps):
    steps.calls += 1


class Keeper:
    def keep(self, errors, value):
        errors["last"] = value


def test_data_that_a_method_of_another_object_changes_is_kept():
    keeper, kept = Keeper(), [{"last": one} for one in (1, 2)]
    carried(lambda n: reading_with(keeper, kept[n]))
    assert kept[1] == {"last": 1}


def reading_with(keeper, errors):
    return lambda _, bucket: keeper.keep(errors, bucket)


def test_what_code_changes_is_kept():
    def counting(n):
        steps = Steps(5 - n, scale=n)
        steps.seen = {n, (n, "w")}
        draws, kept = (
            random.Random(n),
            {(0, n): np.full(2, n), "last": np.float32(n), "pair": Pair(n, 0)},
        )
        late = 7 - n + 0j

        def hook(_, bucket):
            nonlocal late
            late += 1
            steps.count()
            kept["last"] = draws.random()
            return bucket, steps, kept

        hook.parts = lambda: (steps, draws, kept, late)
        return hook

    steps, draws, kept, late = carried(counting).parts()
    # The scale is an option: only the constructor assigns it.
    assert (steps.calls, steps.seen, steps.scale) == (5, {0, (0, "w")}, 1)
    assert (draws.random(), late) == (random.Random(0).random(), 7)
    assert kept[0, 0].tolist() == [0, 0]
    assert (kept["last"], type(kept["last"]), kept["pair"]) == (0, np.float32, Pair(0, 0))
    frozen = [Frozen(torch.ones(n + 1), 0.5 + n) for n in range(2)]
    carried(lambda n: reading(frozen[n]))
    assert (frozen[1].errors.tolist(), frozen[1].lr) == ([1.0], 1.5)
    assert assigned_through(frozen[0]) == assigned_through(Options()) == frozenset()
