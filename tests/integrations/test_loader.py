"""An ExactLoader resumes at any batch, with the samples and the random values of an undisturbed pass."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from hpcrun.checkpoint.state.generators import cpu_states
from hpcrun.errors import UserError
from hpcrun.train.data.exact_loader import ExactLoader
from hpcrun.train.data.found_generators import generators_in

from .loops import Augmented, Lines, SavedLines

PASSES = 2


class Drawing(Sampler):
    """Sampler that draws each index from the global generators, when it is asked for the index."""

    def __iter__(self):
        return ((random.randrange(9) + np.random.randint(9) + i) % 27 for i in range(11))

    def __len__(self):
        return 11


class Changing(Sampler):
    """Sampler with another order in each iteration, which no seed decides."""

    def __init__(self):
        self.turn = 0

    def __iter__(self):
        self.turn += 1
        return iter(np.roll(range(27), self.turn).tolist())

    def __len__(self):
        return 27


class Unsteady(IterableDataset):
    """Dataset without a state, and with other samples in each process."""

    def __iter__(self):
        return (random.SystemRandom().random() for _ in range(8))


def exact(make):
    torch.manual_seed(5)
    return ExactLoader(make(), rank=0)


def plain(batch):
    return [repr(value.tolist()) for value in batch]


def read(loader, most=10**6, out=None):
    """Append the batches of the passes that are left to ``out``, until it has ``most``; return it."""
    out = [] if out is None else out
    while len(out) < most and loader.epoch < PASSES:
        for batch in loader:
            if loader.epoch >= PASSES:
                return out
            out.append(plain(batch))
            if len(out) == most:
                return out
    return out


DATA = Augmented()
MAKERS = {
    "shuffled": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "dropped": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, drop_last=True),
    "drawing": lambda: DataLoader(Augmented(), batch_size=4, sampler=Drawing()),
    "generator": lambda: DataLoader(
        Augmented(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "weighted": lambda: DataLoader(
        Augmented(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 20 + [9.0] * 7, 30)
    ),
    "batches": lambda: DataLoader(
        Augmented(), batch_sampler=BatchSampler(RandomSampler(DATA), 4, True)
    ),
    "single": lambda: DataLoader(Augmented(), batch_size=None, shuffle=True),
    "lines": lambda: DataLoader(Lines(), batch_size=2),
    "saved lines": lambda: DataLoader(SavedLines(), batch_size=2, drop_last=True),
    "workers": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=2),
    "lines of workers": lambda: DataLoader(SavedLines(), batch_size=2, num_workers=3),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_two_resumes_give_the_batches_of_an_undisturbed_pass(kind):
    make = MAKERS[kind]
    whole = read(exact(make))
    length = len(whole) // PASSES
    assert whole[:length] != whole[length:]
    few = {1, length, length + 2}
    for cut in few if "workers" in kind else few | {0, 3, length - 1, len(whole) - 1}:
        first = exact(make)
        found = read(first, cut) if cut else []
        second = exact(make)
        second.load_state_dict(first.state_dict())
        read(second, min(cut + 2, len(whole)), found)
        third = exact(make)
        third.load_state_dict(second.state_dict())
        assert read(third, len(whole), found) == whole, cut


def test_the_position_may_be_behind_the_fetched_batches():
    make = MAKERS["shuffled"]
    whole = read(exact(make))
    first = exact(make)
    read(first, 5)
    second = exact(make)
    second.load_state_dict(first.state_dict(batches=3))
    assert read(second) == whole[3:]
    with pytest.raises(ValueError, match="9 batches, but 5 were handed out"):
        first.state_dict(batches=9)


def test_a_resume_reads_no_sample_before_the_position():
    class Counting(Augmented):
        read = 0

        def __getitem__(self, index):
            Counting.read += 1
            return super().__getitem__(index)

    first = exact(lambda: DataLoader(Counting(), batch_size=4))
    read(first, 5)
    second = exact(lambda: DataLoader(Counting(), batch_size=4))
    second.load_state_dict(first.state_dict())
    Counting.read = 0
    read(second, 1)
    assert Counting.read == 4


def test_the_generators_of_the_training_stay_as_they_are():
    for kind in ("drawing", "lines", "saved lines"):
        loader = exact(MAKERS[kind])
        before = repr(cpu_states())
        read(loader)
        assert repr(cpu_states()) == before


def test_two_loaders_of_a_training_have_different_orders():
    torch.manual_seed(1)
    data = TensorDataset(torch.arange(40))
    one, two = (ExactLoader(DataLoader(data, shuffle=True), name=name) for name in ("a", "b"))
    assert read(one) != read(two)


GLOBAL = np.random.default_rng(8)


def test_generators_in_attributes_closures_variables_and_classes_are_found():
    own, numbers, data = random.Random(1), np.random.default_rng(2), Augmented()
    data.transforms = [lambda x: x + own.random(), {"noise": numbers}]
    assert {id(one) for one in generators_in(data)} == {id(data.crop), id(own), id(numbers)}

    def shift(x, own=torch.Generator()):  # noqa: B008
        return x + GLOBAL.random()

    class Shift:
        own = random.Random(1)

        def __call__(self, x):
            return called(x)

    def called(x):
        return shift(x)

    wanted = {id(GLOBAL), id(shift.__defaults__[0])}
    assert {id(one) for one in generators_in(lambda x: shift(x))} == wanted
    data.transforms = [Shift()]
    assert {id(one) for one in generators_in(data)} == {id(data.crop), id(Shift.own), *wanted}


def test_a_resumed_stream_sees_the_seed_of_its_worker():
    class Seeded(IterableDataset):
        def __iter__(self):
            numbers = np.random.default_rng(get_worker_info().seed)
            return (numbers.random() for _ in range(4))

    def make():
        return DataLoader(Seeded(), batch_size=2, num_workers=2)

    first = exact(make)
    found = read(first, 1)  # the next batch is that of worker 1
    second = exact(make)
    second.load_state_dict(first.state_dict())
    assert read(second, 8, found) == read(exact(make))


class Objects(Lines):
    """Dataset with an object in its state."""

    def state_dict(self):
        return {"place": random.Random()}

    def load_state_dict(self, state):
        raise AssertionError(state)


@pytest.mark.parametrize(
    ("saved", "make", "text"),
    [
        (
            None,
            lambda: DataLoader(Augmented(), batch_size=4, sampler=Changing()),
            "Changing gives other samples when it is iterated again",
        ),
        (None, lambda: DataLoader(Objects()), r"Objects.state_dict\(\) has more than numbers"),
        (MAKERS["shuffled"], MAKERS["weighted"], "WeightedRandomSampler gives other samples"),
        (MAKERS["saved lines"], MAKERS["lines of workers"], "set num_workers=1"),
        (
            lambda: DataLoader(Unsteady(), batch_size=2),
            lambda: DataLoader(Unsteady(), batch_size=2),
            "Unsteady: its batch 1 differs",
        ),
    ],
)
def test_other_samples_are_refused_at_the_first_batch(saved, make, text, capsys):
    loader = exact(make)
    if saved is not None:
        first = exact(saved)
        read(first, 1)
        loader.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=text):
        read(loader, 1)
    replays = "so 1 batches are read again" in capsys.readouterr().err
    assert replays == ("Unsteady" in text)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: [1, 2], "is a list, not a torch.utils.data.DataLoader"),
        (
            lambda: type("PrefetchLoader", (), {"__module__": "timm.data.loader"})(),
            "is a PrefetchLoader, .* --no-prefetcher",
        ),
        (lambda: DataLoader(IterableWrapper([1])), "is a DataPipe"),
        (
            lambda: type("Mine", (DataLoader,), {"__iter__": lambda _: iter(())})([1]),
            "Mine iterates",
        ),
    ],
)
def test_a_loader_that_cannot_be_exact_is_refused(make, text):
    with pytest.raises(UserError, match=text):
        ExactLoader(make())
