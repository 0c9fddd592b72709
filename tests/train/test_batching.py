"""The division of a step's samples among ranks and micro-batches: every sample once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.train.data.batches import training_steps
from hpcrun.train.data.batching import Batching, accumulation_of
from tests.train.test_data import Endless, Numbers

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
        positions, counts = batching.positions(step, rank), batching.counts(step, rank)
        assert len(positions) == len(counts) == batching.micro_batches(step)
        for places, count in zip(positions, counts, strict=True):
            assert len(places) == (count or 1)
            found += places.tolist()[:count]
    return found


@settings(max_examples=60)
@given(**shapes, epoch=st.integers(1, 90), uneven=st.sampled_from(["across", "pad", "join"]))
def test_every_sample_of_every_epoch_counts_once(batch_size, ranks, accumulation, epoch, uneven):
    batching = Batching(batch_size, ranks, accumulation, uneven, epoch)
    steps = 2 * epoch if uneven == "across" else 2 * batching.steps_per_epoch
    found = [position for step in range(steps) for position in taken(batching, step)]
    assert sorted(found) == list(range(len(found)))
    assert len(found) == (steps * batch_size if uneven == "across" else 2 * epoch)
    assert batching.samples(range(1, steps)) == len(found) - len(batching.span(0))


@settings(max_examples=60)
@given(**shapes, epoch=st.integers(40, 90))
def test_dropping_omits_only_the_end_of_each_epoch(batch_size, ranks, accumulation, epoch):
    batching = Batching(batch_size, ranks, accumulation, "drop", epoch)
    whole = epoch // batch_size * batch_size
    found = [
        position
        for step in range(2 * batching.steps_per_epoch)
        for position in taken(batching, step)
    ]
    assert sorted(found) == [*range(whole), *range(epoch, epoch + whole)]
    assert batching.samples(range(2 * batching.steps_per_epoch)) == len(found)


@settings(max_examples=60)
@given(
    batch_size=st.integers(1, 60),
    ranks=st.integers(1, 7),
    micro_batch=st.integers(1, 20),
    epoch=st.integers(60, 99),
)
def test_micro_batches_respect_their_limit(batch_size, ranks, micro_batch, epoch):
    config = with_batches(batch_size=batch_size, micro_batch=micro_batch)
    accumulation = accumulation_of(config, ranks)
    batching = Batching(batch_size, ranks, accumulation, "pad", epoch)
    alone = Batching(batch_size, 1, 1, "pad", epoch)
    for step in range(alone.steps_per_epoch):
        counts = [count for rank in range(ranks) for count in batching.counts(step, rank)]
        assert max(counts) <= micro_batch
        assert sorted(taken(batching, step)) == taken(alone, step)
    assert accumulation == 1 or ranks * (accumulation - 1) * micro_batch < batch_size


@settings(max_examples=60)
@given(**shapes, epoch=st.integers(1, 90), step=st.integers(0, 200))
def test_without_weights_all_micro_batches_have_the_same_size(
    batch_size, ranks, accumulation, epoch, step
):
    batching = Batching(batch_size, ranks, accumulation, "pad", epoch)
    every = [count for rank in range(ranks) for count in batching.counts(step, rank)]
    weights = [batching.weights(step, rank) for rank in range(ranks)]
    if None in weights:
        assert set(map(str, weights)) == {"None"}
        assert len(set(every)) == 1
    else:
        assert [count for counts in weights for count in counts] == every
        assert len(set(every)) == 2
    if batching.always_even:
        assert weights == [None] * ranks


def test_fewer_ranks_take_the_same_batch_in_more_micro_batches():
    config = with_batches(batch_size=64, micro_batch=8)
    assert [accumulation_of(config, ranks) for ranks in (8, 4, 3, 1)] == [1, 2, 3, 8]
    assert accumulation_of(with_batches(batch_size=64, accumulation=2), 3) == 2


@pytest.mark.parametrize(
    ("batching", "lines"),
    [
        (Batching(32, 4, 2), ["batch of 32: 4 ranks x 2 micro-batches x 4 samples"]),
        (
            Batching(32, 4, 2, "across", 100),
            [
                "batch of 32: 4 ranks x 2 micro-batches x 4 samples",
                "epoch of 100 samples: 3.1 steps",
                "12 steps in all: 3.8 epochs",
            ],
        ),
        (
            Batching(32, 3, 2, "pad", 100),
            [
                "batch of 32: 3 ranks x 2 micro-batches x 5 or 6 samples, weighted by samples",
                "epoch of 100 samples: 4 steps; the last one has 4 samples, and empty ranks compute "
                "padding of weight 0",
                "12 steps in all: 3 epochs",
            ],
        ),
        (
            Batching(32, 1, 1, "drop", 100),
            [
                "batch of 32: 1 rank x 1 micro-batch x 32 samples",
                "epoch of 100 samples: 3 steps; the last 4 are dropped",
                "12 steps in all: 4 epochs",
            ],
        ),
        (
            Batching(250, 1, 1, "across", 100_000),
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


@pytest.mark.parametrize(
    ("dataset", "changes", "line"),
    [
        (Numbers(5), {"uneven": "drop"}, "train.uneven: drop would drop all of the 5 samples"),
        (
            Endless(),
            {"uneven": "pad"},
            "train.uneven: pad needs the end of an epoch, but data: ",
        ),
        (
            Endless(),
            {"world_size": 4, "accumulation": 3},
            "train.batch_size: 8 samples are too few for 4 ranks",
        ),
    ],
)
def test_an_unsupported_data_set_is_refused_in_one_line(dataset, changes, line):
    if isinstance(dataset, Endless):
        dataset.state_dict = dict
        dataset.load_state_dict = dict
        dataset.shards_itself = False
    shape = {"world_size": 1, "batch_size": 8, "accumulation": 1} | changes
    with pytest.raises(UserError) as told:
        training_steps(
            dataset, range(3), rank=0, **shape, seed=0, workers=0, pin_memory=False
        )  # fmt: skip
    assert str(told.value).startswith(line)
    assert "\n" not in str(told.value)
