"""Batches: the same from any step, each sample on one rank, for any number of loader processes."""

import multiprocessing
import os
import random
import signal
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, IterableDataset

from hpcrun.config import override_layer, resolve
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.train.data.batches import length, training_steps
from hpcrun.train.data.batching import worker_processes
from hpcrun.train.step.precision import to_device
from hpcrun.train.validation import ValidationData


class Numbers(Dataset):
    """A data set in which sample i is i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return torch.tensor(index)


class Noisy(Numbers):
    """Sample i with noise from every generator that a data set may use."""

    def __getitem__(self, index):
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


def steps(dataset, first, last, **changes):
    """Return the micro-batches of the steps as a list of lists of samples per step."""
    shape = {
        "rank": 0,
        "world_size": 1,
        "batch_size": 4,
        "accumulation": 2,
        "seed": 3,
        "workers": 0,
        "pin_memory": False,
    }
    batches = training_steps(dataset, range(first, last), **(shape | changes))
    return [[micro.tolist() for micro in step] for step in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_any_step_equal_the_undisturbed_pass(workers):
    whole = steps(Numbers(10), 0, 7, workers=workers)
    assert whole == steps(Numbers(10), 0, 7)
    for first in (1, 4, 7):
        assert steps(Numbers(10), first, 7, workers=workers) == whole[first:]


def test_noise_of_loader_processes_depends_on_the_position_only():
    whole = steps(Noisy(10), 0, 7, workers=2)
    assert steps(Noisy(10), 3, 7, workers=2) == whole[3:]
    assert steps(Noisy(10), 0, 7, workers=1) == whole
    samples = [tuple(sample) for step in whole for micro in step for sample in micro]
    # 28 positions over almost three epochs: each epoch draws new noise for a sample.
    assert len({noise for _, *noise_of in samples for noise in noise_of}) == 3 * 28


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_does_not_use_the_saved_generators(workers):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    steps(Numbers(10), 0, 3, workers=workers)
    list(ValidationData(Numbers(10), Ranks(), batch_size=4, accumulation=1, limit=1))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]


def test_closing_ends_the_loader_processes():
    before = set(multiprocessing.active_children())
    batches = training_steps(
        Numbers(10), range(100), rank=0, world_size=1, batch_size=2, accumulation=1, seed=0,
        workers=2, pin_memory=False,
    )  # fmt: skip
    next(batches)
    assert len(set(multiprocessing.active_children()) - before) == 2
    batches.close()
    assert set(multiprocessing.active_children()) == before


def test_loader_processes_ignore_the_signals_for_ranks():
    before = set(multiprocessing.active_children())
    batches = training_steps(
        Numbers(10), range(30), rank=0, world_size=1, batch_size=2, accumulation=1, seed=0,
        workers=2, pin_memory=False,
    )  # fmt: skip
    read = [next(batches) for _ in range(3)]
    for worker in set(multiprocessing.active_children()) - before:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGUSR2)
    assert len([*read, *batches]) == 30


class Endless(IterableDataset):
    """A stream with a length, as many have."""

    def __len__(self):
        return 10

    def __iter__(self):
        return iter(range(10))


class WithoutLength(Dataset):
    """A map-style data set without a length."""

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "line"),
    [
        (Endless(), "data: Endless is a stream"),
        (WithoutLength(), "data: WithoutLength has no length; give a map-style dataset"),
        (Numbers(0), "data: Numbers holds no samples; check the data options"),
    ],
)
def test_an_unusable_dataset_is_refused_before_the_first_step(dataset, line):
    with pytest.raises(UserError, match=line):
        length(dataset)
    with pytest.raises(UserError, match=line):
        training_steps(
            dataset, range(1), rank=0, world_size=1, batch_size=1, accumulation=1, seed=0,
            workers=0, pin_memory=False,
        )  # fmt: skip


def validated(size, world_size, limit=None, accumulation=1, batch_size=4):
    """Return the validated samples of each rank: a list of (samples, count) per rank."""
    return [
        [
            (batch.tolist(), count)
            for batch, count in ValidationData(
                Numbers(size),
                Ranks(rank, world_size),
                batch_size=batch_size,
                accumulation=accumulation,
                limit=limit,
            )
        ]
        for rank in range(world_size)
    ]


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 30), world_size=st.integers(1, 5), accumulation=st.integers(1, 3))
def test_validation_takes_every_sample_on_exactly_one_rank(size, world_size, accumulation):
    shares = validated(size, world_size, accumulation=accumulation)
    seen = [sample for share in shares for batch, _ in share for sample in batch]
    assert sorted(seen) == list(range(size))
    assert all(len(batch) == count for share in shares for batch, count in share)


def test_a_limited_validation_spreads_its_samples():
    def chosen(world_size):
        shares = validated(1000, world_size, limit=5, batch_size=20)
        return sorted(sample for share in shares for batch, _ in share for sample in batch)

    samples = chosen(1)
    assert len(set(samples)) == 100
    assert chosen(4) == samples
    # A data set sorted by class must not be validated on its first class only.
    assert all(
        any(first <= sample < first + 200 for sample in samples) for first in range(0, 1000, 200)
    )


def test_validation_in_loader_processes_repeats_and_leaves_no_process():
    before = set(multiprocessing.active_children())
    random.seed(3)
    data = ValidationData(Noisy(9), Ranks(), batch_size=4, accumulation=1, limit=None, workers=2)
    torch.manual_seed(1)
    passes = [[batch.tolist() for batch, _ in data] for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(1).get_state())
    assert passes[0] == passes[1]
    assert [int(sample[0]) for batch in passes[0] for sample in batch] == list(range(9))
    # The same processes read both passes, and would serve a third.
    assert len(set(multiprocessing.active_children()) - before) == 2
    data.close()
    assert set(multiprocessing.active_children()) == before


@pytest.mark.parametrize(
    ("overrides", "given", "processes"),
    [
        ([], None, 0),
        ([], "1", 0),
        ([], "4", 3),
        ([], "64", 8),
        (["job.cpus_per_task=3"], "64", 2),
        (["job.cpus_per_task=3", "data.workers=0"], "64", 0),
        (["data.workers=12"], None, 12),
    ],
)
def test_loader_processes_follow_from_the_cores_of_a_rank(overrides, given, processes):
    wanted = resolve([override_layer(overrides)])
    environ = {} if given is None else {"SLURM_CPUS_PER_TASK": given}
    assert worker_processes(wanted, environ) == processes
    # The config takes precedence over the task's default.
    by_task = processes if "data.workers" in str(overrides) else 1
    assert worker_processes(wanted, environ, 1) == by_task


class Pair(NamedTuple):
    a: torch.Tensor
    b: str


@dataclass(frozen=True)
class Sentence:
    words: torch.Tensor
    name: str


class Graph:
    """A batch that is moved in place."""

    def __init__(self):
        self.nodes = torch.ones(3)

    def to(self, device):
        self.nodes = self.nodes.to(device)
        return self


class Mesh(Graph):
    def to(self, device):
        super().to(device)


def test_all_tensors_of_a_batch_are_moved():
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {
        "pair": Pair(torch.ones(2), "a"),
        "deeper": [Sentence(torch.ones(2), "b"), (Graph(), Mesh(), packed, None, 3)],
    }
    moved = to_device(batch, torch.device("meta"))
    sentence, (graph, mesh, parts, *others) = moved["deeper"]
    assert (moved["pair"].b, sentence.name, others) == ("a", "b", [None, 3])
    for tensor in (moved["pair"].a, sentence.words, graph.nodes, mesh.nodes, parts.data):
        assert tensor.is_meta
    # For torch's own classes.
    assert parts.batch_sizes.device.type == "cpu"
    kept = batch["deeper"]
    assert not kept[0].words.is_meta
    assert not kept[1][0].nodes.is_meta
