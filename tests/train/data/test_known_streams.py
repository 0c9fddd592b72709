"""Streams of other packages: exact where they can be, and refused in one line where not."""

import pytest
import torch
from torch.utils.data import IterableDataset

from hpcrun import UserError, training_steps


class Counting(IterableDataset):
    """A stream in the interface of Hugging Face ``datasets``."""

    def __init__(self):
        self.state, self.start, self.epoch = {"epoch": 0, "next": 0}, None, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.start = dict(state)

    def __iter__(self):
        # As in datasets: a loaded state counts for its epoch only, and stays.
        resumed = self.start is not None and self.start["epoch"] == self.epoch
        self.state = {"epoch": self.epoch, "next": self.start["next"] if resumed else 0}
        while self.state["next"] < 10:
            self.state["next"] += 1
            yield torch.tensor(100 * self.epoch + self.state["next"])


class Mosaic(IterableDataset):
    """A stream in the interface of Mosaic's StreamingDataset."""

    def state_dict(self, num_samples, from_beginning):
        return {"epoch": 0, "sample_in_epoch": num_samples}

    def load_state_dict(self, state):
        pass

    def __iter__(self):
        yield torch.tensor(0)


def read(stream, first, last, *, workers=0, saved=None):
    shape = {"rank": 0, "world_size": 1, "batch_size": 4, "accumulation": 1, "seed": 1}
    steps = training_steps(
        stream, range(first, last), workers=workers, pin_memory=False, saved=saved, **shape
    )
    found = [(step[0].tolist(), steps.saved(first + n + 1)) for n, step in enumerate(steps)]
    steps.close()
    return [batch for batch, _ in found], [state for _, state in found]


def test_a_state_for_one_epoch_resumes_in_every_pass():
    whole, states = read(Counting(), 0, 9)
    for first in range(1, 9):
        assert read(Counting(), first, 9, saved=states[first - 1])[0] == whole[first:]


def test_a_stream_of_datasets_in_loaders_is_refused(monkeypatch):
    class BufferShuffledExamplesIterable:
        ex_iterable = None

    class Mapped:
        ex_iterable = BufferShuffledExamplesIterable()

    for kind in (Counting, Mapped, BufferShuffledExamplesIterable):
        monkeypatch.setattr(kind, "__module__", "datasets.iterable_dataset")
    with pytest.raises(UserError, match=r"data\.workers: 2 processes of a Counting of the package"):
        read(Counting(), 0, 1, workers=2)
    assert read(Counting(), 0, 1)[0] == [[1, 2, 3, 4]]
    shuffled = Counting()
    shuffled._ex_iterable = Mapped()
    with pytest.raises(UserError, match=r"Counting\.shuffle\(\) lacks the samples in its buffer"):
        read(shuffled, 0, 1)


def test_a_state_that_needs_arguments_is_refused_with_the_remedy():
    with pytest.raises(UserError, match=r"Mosaic\.state_dict\(\) missing 2 .*; write it without"):
        read(Mosaic(), 0, 1)


def test_errors_inside_the_state_of_a_stream_stay_unchanged():
    class Broken(Counting):
        def state_dict(self):
            return {"next": None + 1}

    with pytest.raises(TypeError, match="unsupported operand"):
        read(Broken(), 0, 1)


def test_the_real_package_datasets_resumes_exactly():
    datasets = pytest.importorskip("datasets")

    def made():
        rows = datasets.Dataset.from_dict({"x": list(range(30))})
        return rows.to_iterable_dataset(num_shards=3).map(lambda row: {"x": 2 * row["x"]})

    def values(first, saved=None):
        steps = training_steps(
            made(), range(first, 12), rank=0, world_size=1, batch_size=4, accumulation=1, seed=1,
            workers=0, pin_memory=False, saved=saved,
        )  # fmt: skip
        return [(step[0]["x"].tolist(), steps.saved(first + n + 1)) for n, step in enumerate(steps)]

    whole = values(0)
    for first in (1, 5, 9):
        again = [batch for batch, _ in values(first, whole[first - 1][1])]
        assert again == [batch for batch, _ in whole[first:]]
    with pytest.raises(UserError, match="lacks the samples in its buffer"):
        training_steps(
            made().shuffle(seed=1), range(3), rank=0, world_size=1, batch_size=4, accumulation=1,
            seed=1, workers=0, pin_memory=False,
        )  # fmt: skip
