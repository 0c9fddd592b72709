"""Streams: each sample once for any readers, and the same samples after a resume."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from hpcrun.checkpoint.sharded.rank_file import pack
from hpcrun.errors import UserError
from hpcrun.train.data.batches import require_trainable, training_steps
from tests.support.pages import code_blocks


class Counting(IterableDataset):
    """A stream in one order: the numbers below ``size``, shuffled by the number of the pass."""

    shards_itself = False

    def __init__(self, size=23):
        self.size, self.next, self.epoch = size, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(self.size), self.size)
        while self.next < self.size:
            self.next += 1
            yield self.sample(order[self.next - 1])
        self.next = 0

    def sample(self, number):
        return torch.tensor(float(number + 1000 * self.epoch))


class Skipping(Counting):
    """The same stream, which can skip samples without making them."""

    def sample(self, number):
        self.made = getattr(self, "made", 0) + 1
        return super().sample(number)

    def skip_samples(self, count):
        passed = min(count, self.size - self.next)
        self.next += passed
        if passed < count:
            self.next = 0
        return passed


class Noisy(Counting):
    """The same stream, with noise from every generator that a sample may use."""

    def sample(self, number):
        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([float(number), *noise], dtype=torch.float64)


class Sharded(Counting):
    """A stream that shards itself: each rank and loader process has different numbers and amounts."""

    shards_itself = True

    def __init__(self, rank, world_size, size=11):
        super().__init__(size + 2 * rank)
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        while self.next < self.size:
            number = self.next
            self.next += 1
            if number % parts == part:
                yield torch.tensor(number * self.world_size + self.rank + 1000 * self.epoch)
        self.next = 0


SHAPE = {
    "rank": 0,
    "world_size": 1,
    "batch_size": 8,
    "accumulation": 1,
    "seed": 3,
    "workers": 0,
    "pin_memory": False,
}


def steps(stream, first, last, *, until=None, saved=None, **changes):
    """Return the samples of the steps up to ``until``, a list per micro-batch, and the state there."""
    batches = training_steps(stream, range(first, last), saved=saved, **(SHAPE | changes))
    until = last if until is None else until
    read = [[micro.tolist() for micro in next(batches)] for _ in range(first, until)]
    state = batches.saved(until)
    batches.close()
    return read, state


def flat(read):
    return [sample for step in read for micro in step for sample in micro]


def sharded(rank, world_size=2):
    return Sharded(rank, world_size)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Counting, Skipping])
def test_one_order_is_distributed_over_ranks_and_processes(kind, workers):
    whole = steps(Counting(), 0, 9)[0]
    assert len(set(flat(whole))) == 72
    for world_size, accumulation in ((2, 1), (2, 2), (1, 4), (3, 2)):
        ranks = [
            steps(
                kind(), 0, 9, rank=rank, world_size=world_size, accumulation=accumulation,
                workers=workers,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        for number, (batch,) in enumerate(whole):
            taken = [
                ranks[rank][0][number][micro]
                for micro in range(accumulation)
                for rank in range(world_size)
            ]
            assert [sample for micro in taken for sample in micro] == batch
        states = [state for _, state in ranks]
        assert all(state == states[0] for state in states)


@settings(max_examples=30)
@given(
    size=st.integers(1, 40),
    stop=st.integers(0, 6),
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from([Counting, Skipping]),
)
def test_one_order_resumes_exactly_on_another_number_of_ranks(size, stop, before, after, kind):
    whole = flat(steps(Counting(size), 0, 6)[0])
    state = steps(kind(size), 0, 6, until=stop, rank=before - 1, world_size=before)[1]
    rest = [
        steps(kind(size), stop, 6, rank=rank, world_size=after, saved=state)[0]
        for rank in range(after)
    ]
    for number in range(stop, 6):
        taken = [sample for rank in rest for micro in rank[number - stop] for sample in micro]
        assert taken == whole[8 * number : 8 * number + 8]


def test_samples_of_other_ranks_are_skipped_without_being_made():
    stream = Skipping(1000)
    steps(stream, 0, 10, rank=1, world_size=4)
    assert stream.made == 20


# Seven samples are uneven shares.
@pytest.mark.parametrize(
    ("workers", "accumulation", "samples"), [(0, 1, 8), (0, 2, 7), (1, 1, 8), (2, 1, 8), (2, 2, 7)]
)
def test_a_stream_that_shards_itself_resumes_exactly_from_any_stop(workers, accumulation, samples):
    shape = {"workers": workers, "accumulation": accumulation, "world_size": 2}
    shape["batch_size"] = samples
    for rank in (0, 1) if not workers else (1,):
        whole, _ = steps(sharded(rank), 0, 6, rank=rank, **shape)
        seen = flat(whole)
        # Several passes, which end within batches, at different steps on each rank.
        assert max(seen) > 1000
        assert all(sample % 1000 % 2 == rank for sample in seen)
        for stop in (1, 3):
            first, state = steps(sharded(rank), 0, 6, until=stop, rank=rank, **shape)
            again = steps(sharded(rank), stop, 6, saved=state, rank=rank, **shape)
            assert first + again[0] == whole
            # A second stop before any sample is read.
            idle = steps(sharded(rank), stop, 6, until=stop, saved=state, rank=rank, **shape)[1]
            assert idle == state


@pytest.mark.parametrize("workers", [0, 2])
def test_random_values_of_a_sample_survive_a_resume(workers):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    whole, _ = steps(Noisy(), 0, 6, workers=workers, world_size=2)
    if workers:
        assert whole == steps(Noisy(), 0, 6, workers=1, world_size=2)[0]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first, state = steps(Noisy(), 0, 6, until=2, workers=workers, world_size=2)
    assert first + steps(Noisy(), 2, 6, workers=workers, world_size=2, saved=state)[0] == whole


def test_the_state_can_be_saved_in_a_checkpoint():
    for stream in (Counting(), Sharded(0, 1)):
        state = steps(stream, 0, 3, workers=2)[1]
        for part in (state.shared, state.own):
            assert torch.load(io.BytesIO(pack(part)), weights_only=True) == part


class Bare(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class HalfWritten(Bare):
    def state_dict(self):
        return {}


class Undeclared(Counting):
    shards_itself = None


class NotPlain(Counting):
    def state_dict(self):
        return {"order": np.arange(3)}


class PlainAtFirst(Counting):
    def __iter__(self):
        for number in np.arange(9, dtype=np.float32):
            self.next = number + 1
            yield torch.tensor(0)


class OnePass(Counting):
    """A stream that gives nothing when iterated a second time."""

    def __iter__(self):
        while self.next < self.size:
            self.next += 1
            yield torch.tensor(self.next)


@pytest.mark.parametrize(
    ("stream", "ranks", "workers", "line"),
    [
        (Bare(), 1, 0, "data: Bare is a stream without state_dict and load_state_dict, so "),
        (HalfWritten(), 1, 0, "data: HalfWritten is a stream without load_state_dict, so "),
        (Undeclared(), 2, 0, "data: Undeclared does not say how 2 ranks x 1 loader processes"),
        (Undeclared(), 1, 2, "data: Undeclared does not say how 1 ranks x 2 loader processes"),
        (NotPlain(), 1, 0, r"data: NotPlain.state_dict\(\).order: a numpy.ndarray cannot be saved"),
    ],
)
def test_a_stream_that_cannot_resume_is_refused(stream, ranks, workers, line):
    with pytest.raises(UserError, match=line):
        require_trainable(stream, ranks, workers)
    require_trainable(Undeclared(), 1, 1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stream", [OnePass(5), Counting(0)])
def test_a_pass_without_a_sample_is_an_error(stream, workers):
    with pytest.raises(UserError, match=r"^data: \w+ gave no sample in a whole pass"):
        steps(stream, 0, 3, workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_is_not_plain_fails_immediately(workers):
    with pytest.raises(
        UserError, match=r"^data: PlainAtFirst.state_dict\(\).next: a numpy.float32"
    ):
        steps(PlainAtFirst(), 0, 3, until=1, workers=workers)


def test_the_documented_example_is_distributed_and_resumes():
    page = (Path(__file__).parents[3] / "docs" / "checkpointing.md").read_text()
    (code,) = [text for text in code_blocks(page, "python") if "class Lines" in text]
    made = {}
    exec(code, made)

    def lines():
        return made["Lines"](torch.arange(21))

    whole = flat(steps(lines(), 0, 6)[0])
    assert sorted(whole[:21]) == list(range(21))
    state = steps(lines(), 0, 6, until=2)[1]
    ranks = [steps(lines(), 2, 6, rank=rank, world_size=2, saved=state)[0] for rank in (0, 1)]
    assert [sample for pair in zip(*ranks, strict=True) for rank in pair for sample in rank[0]] == (
        whole[16:]
    )


def test_a_checkpoint_of_other_streams_is_refused_and_says_why():
    state = steps(sharded(0), 0, 4, until=2, world_size=2)[1]
    line = "has 2 ranks x 1 loader processes, not 1 x 1; start the same numbers as before"
    with pytest.raises(UserError, match=line):
        steps(sharded(0), 2, 4, saved=state)
    with pytest.raises(UserError, match="not 2 x 3"):
        steps(sharded(0), 2, 4, saved=state, world_size=2, workers=3)
    # With no or one loader process there is one reader.
    steps(sharded(0), 2, 4, saved=state, world_size=2, workers=1)
    with pytest.raises(
        UserError, match="shards_itself was True when step 2 was saved, and is False now"
    ):
        steps(Counting(), 2, 4, saved=state, world_size=2)
    with pytest.raises(UserError, match="has no position in it, since it was made with another"):
        steps(Counting(), 2, 4)
