"""The division of a step's samples among ranks and micro-batches: every sample once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.train.data.batches import training_steps
from hpcrun.train.data.batching import Batching, accumulation_of
from tests.train.data.test_data import Endless

shapes = {
    "batch_size": st.integers(1, 40),
    "ranks": st.integers(1, 6),
    "accumulation": st.integers(1, 4),
}


def with_batches(**train):
    return Config.model_validate({"train": train})


def taken(batching, step):
    """Return the counted positions of a step, by rank."""
    found = []
    for rank in range(batching.ranks):
        positions, counts = batching.positions(step, rank), batching.counts(rank)
        assert len(positions) == len(counts) == batching.accumulation
        for places, count in zip(positions, counts, strict=True):
            assert len(places) == (count or 1)
            found += places.tolist()[:count]
    return found


@settings(max_examples=60)
@given(**shapes)
def test_every_position_counts_once(batch_size, ranks, accumulation):
    batching = Batching(batch_size, ranks, accumulation)
    found = [position for step in range(9) for position in taken(batching, step)]
    assert sorted(found) == list(range(9 * batch_size))
    sizes = {count for rank in range(ranks) for count in batching.counts(rank)}
    assert batching.always_even == (len(sizes) == 1)
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60)
@given(
    batch_size=st.integers(1, 60),
    ranks=st.integers(1, 7),
    micro_batch=st.integers(1, 20),
)
def test_micro_batches_respect_their_limit(batch_size, ranks, micro_batch):
    config = with_batches(batch_size=batch_size, micro_batch=micro_batch)
    accumulation = accumulation_of(config, ranks)
    batching = Batching(batch_size, ranks, accumulation)
    assert max(count for rank in range(ranks) for count in batching.counts(rank)) <= micro_batch
    assert sorted(taken(batching, 3)) == taken(Batching(batch_size, 1), 3)
    assert accumulation == 1 or ranks * (accumulation - 1) * micro_batch < batch_size


@pytest.mark.parametrize(
    ("batching", "lines"),
    [
        (Batching(32, 4, 2), ["batch of 32: 4 ranks x 2 micro-batches x 4 samples"]),
        (
            Batching(32, 3, 2, 100),
            [
                "batch of 32: 3 ranks x 2 micro-batches x 5 or 6 samples, weighted by samples",
                "epoch of 100 samples: 3.1 steps",
                "12 steps in all: 3.8 epochs",
            ],
        ),
        (
            Batching(250, 1, 1, 100_000),
            [
                "batch of 250: 1 rank x 1 micro-batch x 250 samples",
                "epoch of 100000 samples: 400 steps",
                "12 steps in all: 0.03 epochs",
            ],
        ),
    ],
)
def test_the_samples_per_rank_are_logged(batching, lines):
    assert list(batching.lines(12)) == lines


def test_a_stream_with_too_few_samples_is_refused():
    stream = Endless()
    stream.state_dict = stream.load_state_dict = dict
    stream.shards_itself = False
    shape = {"world_size": 4, "batch_size": 8, "accumulation": 3, "workers": 0}
    with pytest.raises(UserError, match=r"^train.batch_size: 8 samples are too few for 4 ranks"):
        training_steps(stream, range(3), rank=0, **shape, seed=0, pin_memory=False)
