"""Training on another number of nodes at each start: the batches and their order stay."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrun import get_rank
from hpcrun.config import override_layer, resolve
from hpcrun.run.files import read_lines
from hpcrun.train.data.batching import Batching, accumulation_of, samples
from tests.support.on_ranks import forked
from tests.support.training.faulty_tasks import Exact
from tests.support.training.runs import REFUSED, play_run
from tests.train.runs.test_runs import StreamingItsOwn

BATCH, SAMPLES = 24, 50


class Noted(Exact):
    """The same task; each rank notes its samples, and the first attempts (``stops``) are stopped."""

    class Known(Exact.Known):
        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            with self.file.open("a") as stream:
                stream.write(f"{index}\n")
            return super().__getitem__(index)

    def train_dataset(self):
        dataset = super().train_dataset()
        place = f"{os.environ['SLURM_RESTART_COUNT']}-{get_rank()}"
        dataset.file = Path(self.config.data.own["notes"], place)
        return dataset

    def mishap(self):
        early = int(os.environ["SLURM_RESTART_COUNT"]) < self.config.model.own.get("stops", 0)
        if early and self.calls == 4 and get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Stream(torch.utils.data.IterableDataset):
    """One order for all ranks."""

    shards_itself = False

    def __iter__(self):
        while True:
            yield torch.zeros(4)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state


class Streamed(Exact):
    """The same task on a stream."""

    def train_dataset(self):
        return Stream()


def config(**overrides):
    words = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return resolve([override_layer(words)])


@given(
    least=st.integers(1, 6), more=st.integers(1, 6), gpus=st.integers(1, 8),
    accumulation=st.integers(1, 5), extra=st.integers(0, 500),
)  # fmt: skip
def test_a_micro_batch_never_grows_on_fewer_nodes(least, more, gpus, accumulation, extra):
    most = least + more
    batch = most * gpus * accumulation + extra
    found = config(
        job__nodes=f"{least}-{most}", job__gpus=gpus,
        train__batch_size=batch, train__accumulation=accumulation,
    )  # fmt: skip
    divided = {
        nodes: Batching(batch, nodes * gpus, accumulation_of(found, nodes * gpus))
        for nodes in range(least, most + 1)
    }
    assert divided[most].accumulation == accumulation
    for nodes, batching in divided.items():
        assert batching.micro_batch <= divided[most].micro_batch
        parts = [
            count for rank in range(nodes * gpus) for count in batching.counts(rank)
        ]  # fmt: skip
        assert sum(parts) == batch


def test_one_number_of_nodes_keeps_its_accumulation():
    fixed = config(job__nodes=4, train__batch_size=BATCH, train__accumulation=3)
    assert [accumulation_of(fixed, ranks) for ranks in (8, 4, 3, 1)] == [3, 3, 3, 3]
    ranged = config(job__nodes="1-4", train__batch_size=BATCH, train__accumulation=3)
    assert [accumulation_of(ranged, ranks) for ranks in (8, 4, 3, 2, 1)] == [3, 3, 4, 6, 12]
    limited = config(job__nodes="1-4", train__batch_size=BATCH, train__micro_batch=2)
    assert [accumulation_of(limited, ranks) for ranks in (4, 3, 2, 1)] == [3, 4, 6, 12]


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
@forked
def test_a_run_moves_from_three_nodes_to_two_and_back(tmp_path, parallel):
    options = (
        *("job.nodes=2-3", "job.gpus=1", f"train.batch_size={BATCH}", "train.accumulation=2"),
        *("train.log_every=1", f"data.notes={tmp_path}", f"train.parallel={parallel}"),
    )
    moved = play_run(tmp_path, Noted, *options, "model.stops=2", name="moved", nodes=(3, 2, 3))
    codes = [len(codes) for codes in moved.codes]
    assert codes == [3, 2, 3], moved.said()
    assert moved.codes[-1] == [0, 0, 0], moved.said()

    # Each sample of the global order exactly once in its step, whatever the number of nodes.
    first, second, third = moved.events("started")
    bounds = [0, second.step, third.step, 8]
    for restart, nodes in enumerate(codes):
        span = np.arange(bounds[restart] * BATCH, bounds[restart + 1] * BATCH)
        expected = sorted(samples(span, SAMPLES, seed=0).tolist())
        files = [tmp_path / f"{restart}-{rank}" for rank in range(nodes)]
        found = [int(word) for file in files for word in file.read_text().split()]
        assert sorted(found) == expected

    shapes = [(event.nodes, event.accumulation) for event in (first, second)]
    assert shapes == [(3, 2), (2, 3)]
    said = [line for line in moved.said().splitlines() if " of 2-3 nodes" in line]
    starts = ["3 of 2-3 nodes: accumulation 2;", "2 of 2-3 nodes: accumulation 3 instead of 2;"]
    assert [line.partition("; ")[0] + ";" for line in said] == [
        f"hpcrun: {line}" for line in (*starts, starts[0])
    ]
    changes = [line for line in moved.said().splitlines() if "environment has changed" in line]
    assert ["ranks: 3 -> 2;" in changes[0], "ranks: 2 -> 3;" in changes[1]] == [True, True]

    calm = play_run(tmp_path, Noted, *options, name="calm", nodes=(3,))
    losses, undisturbed = (
        {line["step"]: line["loss"] for line in read_lines(played.run.metrics) if "loss" in line}
        for played in (moved, calm)
    )
    assert losses == pytest.approx(undisturbed, rel=1e-4)
    assert list(losses) == list(range(1, 9))


@forked
def test_a_stream_that_shards_itself_refuses_a_range_of_nodes(tmp_path):
    played = play_run(tmp_path, StreamingItsOwn, "job.nodes=1-2", "job.gpus=1", nodes=(2,))
    assert played.codes == REFUSED, played.said()
    assert "shards itself, so a resume needs the same number of ranks" in played.refusal()


@forked
def test_a_stream_names_the_node_counts_that_divide_its_batch(tmp_path):
    options = ("job.nodes=5-8", "job.gpus=1", "train.batch_size=24", "train.accumulation=3")
    played = play_run(tmp_path, Streamed, *options, nodes=(2,))
    assert played.codes == REFUSED, played.said()
    assert "numbers that work: 6, 8; use one" in played.refusal()
