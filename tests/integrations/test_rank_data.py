"""Ranks that read the same samples, or unequal numbers of batches, are refused in the first steps."""

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import hpcrun
from hpcrun.errors import UserError
from hpcrun.train.own_loop.rank_data import Pass, require_equal_counts
from tests.support.on_ranks import agreed, ranks

SIZE = 24


def data(start=0, stop=SIZE, step=1):
    """Return samples, each of which is its number."""
    return TensorDataset(torch.arange(float(SIZE))[start:stop:step, None])


def end_of(folder, loader, *, epochs=1, valid=None, max_steps=None, limit=None, **options):
    """Train with DDP; return the number of steps, or the refusal."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loaders = [loader] if valid is None else [loader, valid]
    try:
        state = hpcrun.resumable(
            model=model, optimizer=optimizer, loader=loaders, folder=folder, every=1000, **options
        )
        for _ in state.epochs(epochs, max_steps=max_steps):
            for batch in state.batches(loader, limit=limit):
                x = batch[0] if isinstance(batch, list) else batch
                optimizer.zero_grad()
                mse_loss(model(x), x).backward()
                optimizer.step()
                state.step()
            if valid is not None:
                list(state.batches(valid))
    except UserError as error:
        return str(error)
    return state.steps


class Noisy(Dataset):
    """Samples with noise, read in a worker."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.rand(1) + index


class Same(Dataset):
    """Samples of a benchmark: their index changes nothing."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return self.sample()


class SameStream(IterableDataset):
    """Zeros without an order."""

    def __iter__(self):
        return (torch.zeros(1) for _ in range(6))


class Stream(IterableDataset):
    """Numbers from ``start`` to ``stop``."""

    def __init__(self, start, stop, step=1):
        self.numbers = range(start, stop, step)

    def __iter__(self):
        return (torch.tensor([float(number)]) for number in self.numbers)


@ranks(2)
def test_the_same_samples_on_all_ranks_are_refused(tmp_path, rank):
    torch.manual_seed(5)
    samplers = {
        "RandomSampler": {"shuffle": True},
        "SequentialSampler": {},
        "SubsetRandomSampler": {"sampler": SubsetRandomSampler(range(8, 20))},
        "BatchSampler": {"batch_sampler": BatchSampler(SequentialSampler(range(SIZE)), 3, False)},
    }
    for number, (name, options) in enumerate(samplers.items()):
        for workers in (0, 1):
            shape = options if "batch_sampler" in options else {"batch_size": 3, **options}
            loader = DataLoader(Noisy(), num_workers=workers, **shape)
            line = agreed(end_of(tmp_path / f"{name}-{workers}", loader))
            shown = "SequentialSampler" if name == "BatchSampler" else name
            assert line.startswith(
                "loader.0: ranks 0 and 1 read the same samples in the same order ("
            )
            assert f"({shown})" in line
            assert "sampler=DistributedSampler(dataset)" in line
            assert "same_samples=True" in line
            if number:
                break
    loader = DataLoader(Stream(0, 6), batch_size=2, num_workers=1)
    line = agreed(end_of(tmp_path / "stream", loader))
    assert "the first batch of the iterable dataset is the same on all 2 ranks" in line
    # A user who wants it says so.
    loader = DataLoader(Noisy(), batch_size=3, shuffle=True)
    assert agreed(end_of(tmp_path / "wanted", loader, same_samples=True)) == 8


@ranks(4)
def test_a_wrong_distributed_sampler_is_refused(tmp_path, rank):
    cases = [
        ((1, 0), "DistributedSampler has num_replicas=1, and 4 ranks train"),
        ((8, rank), "DistributedSampler has num_replicas=8, and 4 ranks train"),
        ((2, rank // 2), "DistributedSampler has num_replicas=2, and 4 ranks train"),
        ((4, rank // 2), "DistributedSampler has rank=0 on ranks 0 and 1, so"),
        ((4, 0), "DistributedSampler has rank=0 on ranks 0 and 1, so"),
    ]
    for number, (place, text) in enumerate(cases):
        sampler = DistributedSampler(data(), *place)
        line = agreed(end_of(tmp_path / str(number), DataLoader(data(), 3, sampler=sampler)))
        assert text in line
    # Two ranks of a group with tensor parallelism read the same samples.
    sampler = DistributedSampler(data(), 2, rank // 2)
    loader = DataLoader(data(), 3, sampler=sampler)
    assert agreed(end_of(tmp_path / "tp", loader, same_samples=True)) == 4
    # Copies of single samples pad the data of a dataset that is smaller than the ranks.
    few = data(0, 1)
    loader = DataLoader(few, 3, sampler=DistributedSampler(few))
    assert agreed(end_of(tmp_path / "few", loader, epochs=2)) == 2


@ranks(2)
def test_ranks_with_parts_of_their_own_train(tmp_path, rank, capsys):
    part = data(rank, SIZE, 2)
    torch.manual_seed(5)
    loaders = {
        "part": DataLoader(part, 3, shuffle=True),
        "ordered": DataLoader(part, 3, num_workers=1),
        "subset": DataLoader(
            torch.utils.data.Subset(data(), range(rank, SIZE, 2)), 3, shuffle=True
        ),
        "sampler": DataLoader(data(), 3, sampler=SubsetRandomSampler(range(rank, SIZE, 2))),
        "distributed": DataLoader(data(), 3, sampler=DistributedSampler(data())),
        "batches": DataLoader(
            data(), batch_sampler=BatchSampler(DistributedSampler(data()), 3, drop_last=False)
        ),
        "stream": DataLoader(Stream(rank, SIZE, 2), batch_size=3),
    }
    # Each rank validates on all samples, which is no training.
    for name, loader in loaders.items():
        valid = DataLoader(data(), 5)
        assert agreed(end_of(tmp_path / name, loader, epochs=2, valid=valid)) == 8, name
    assert capsys.readouterr().err == ""
    torch.manual_seed(rank)
    loader = DataLoader(data(), 3, shuffle=True)
    assert agreed(end_of(tmp_path / "seeds", loader)) == 8
    line = (
        "hpcrun: loader.0: each of the 2 ranks reads all 24 samples in another order, so an epoch "
    )
    assert capsys.readouterr().err.count(line) == (rank == 0)


@ranks(2)
def test_samples_that_depend_on_no_index_are_not_compared(tmp_path, rank, capsys):
    torch.manual_seed(5)
    loaders = {
        "zeros": DataLoader(Same(lambda: torch.zeros(1)), 3, shuffle=True),
        "noise": DataLoader(Same(lambda: torch.randn(1)), 3),
        "stream": DataLoader(SameStream(), batch_size=2),
    }
    for name, loader in loaders.items():
        assert agreed(end_of(tmp_path / name, loader)) == (3 if name == "stream" else 8), name
    assert capsys.readouterr().err == ""


@ranks(3)
def test_unequal_numbers_of_batches_are_refused(tmp_path, rank):
    sizes = (5, 3, 5)
    own = data(0, sizes[rank])
    own.tensors[0].add_(100 * rank)
    line = agreed(end_of(tmp_path / "known", DataLoader(own)))
    assert line.startswith(
        "loader.0: rank 0 has 5 batches in this pass, and rank 1 has 3, so ranks"
    )
    assert "limit=3" in line
    # The remedies.
    assert agreed(end_of(tmp_path / "limit", DataLoader(own), limit=3, epochs=2)) == 6
    assert agreed(end_of(tmp_path / "most", DataLoader(own), max_steps=3)) == 3
    for workers in (0, 1):
        stream = Stream(100 * rank, 100 * rank + sizes[rank])
        loader = DataLoader(stream, batch_size=1, num_workers=workers)
        line = agreed(end_of(tmp_path / f"stream-{workers}", loader, epochs=2))
        assert line.startswith(
            "loader.0: the pass has ended on rank 1 after 3 batches, and other ranks have more"
        )
        folder = tmp_path / f"stream-limit-{workers}"
        assert agreed(end_of(folder, loader, epochs=2, limit=3)) == 6
        folder = tmp_path / f"stream-most-{workers}"
        assert agreed(end_of(folder, loader, epochs=2, max_steps=3)) == 3
    require_equal_counts([[Pass("loader", n, "", None, None, None, 0)] for n in (4, 5, None)])


@ranks(2)
def test_a_rank_without_a_batch_is_refused(tmp_path, rank):
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(Stream(0, 5 * (1 - rank)), batch_size=1)
    state = hpcrun.resumable(model=model, optimizer=optimizer, loader=loader, folder=tmp_path)
    if rank == 1:  # the other rank would wait in its first step
        epochs = state.epochs(2)
        next(epochs)
        assert list(state.batches(loader)) == []
        with pytest.raises(UserError, match="loader: rank 1 has no batch, so the other ranks"):
            next(epochs)
