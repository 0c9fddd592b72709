"""A resume notices a dataset in memory that differs from that of the first start."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

import hpcrun
from hpcrun.train.own_loop.held_data import held_data
from hpcrun.train.own_loop.session import ENDED

BIG = torch.arange(2.0**16).reshape(-1, 4)


class Pairs(Dataset):
    """Random pairs, with attributes that differ between starts of a sound program."""

    def __init__(self, seed, counter=0, folder="/tmp/1"):
        numbers = torch.Generator().manual_seed(seed)
        self.pairs = [(torch.rand(3, generator=numbers), 1) for _ in range(200)]
        self.counter, self.files, self.cache = counter, [folder], {counter: folder}
        self.itself = self

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        raise AssertionError("a sample is read")


def split(seed):
    return random_split(range(500), [400, 100], torch.Generator().manual_seed(seed))[0]


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (Pairs(1), Pairs(1, counter=7, folder="/tmp/2"), Pairs(2)),
        (split(1), split(1), split(2)),
        (TensorDataset(BIG), TensorDataset(BIG.clone()), TensorDataset(BIG + 1)),
        (TensorDataset(BIG.T), TensorDataset(BIG.T.contiguous()), TensorDataset(BIG)),
        (ConcatDataset([split(1)] * 2), ConcatDataset([split(1)] * 2), ConcatDataset([split(2)] * 2)),
        ([1, 2, 3], [1, 2, 3], [1, 3, 2]),
        (np.eye(200), np.eye(200), np.eye(200)[::-1]),
        (Subset(Pairs(1), [4, 5]), Subset(Pairs(1), [4, 5]), Subset(Pairs(1), [5, 4])),
        (torch.eye(3, dtype=torch.bool), torch.eye(3) > 0, torch.zeros(3, 3) > 0),
    ],
)  # fmt: skip
def test_only_other_data_has_another_mark(one, same, other):
    assert held_data(one) is not None
    assert held_data(one) == held_data(same)
    assert held_data(one) != held_data(other)


@pytest.mark.parametrize(
    "data", [["a", "b"], [], object(), torch.eye(3).to_sparse(), torch.empty(0)]
)
def test_a_dataset_without_numbers_in_memory_has_no_mark(data):
    assert held_data(data) is None


@pytest.mark.parametrize(("seed", "lines"), [(1, 0), (2, 1)])
def test_a_resume_with_other_data_gets_a_line(tmp_path, capsys, seed, lines):
    def train(seed):
        torch.manual_seed(0)
        data = torch.rand(8, 2, generator=torch.Generator().manual_seed(seed))
        model = torch.nn.Linear(2, 1)
        parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        state = hpcrun.resumable(**parts, loader=DataLoader(data, batch_size=4), folder=tmp_path)
        for _ in state.epochs(1 + bool(state.steps)):
            for batch in state.batches():
                parts["optimizer"].zero_grad()
                model(batch).sum().backward()
                parts["optimizer"].step()
                state.step()

    train(1)
    ENDED.clear()  # A new process has none.
    assert "other data" not in capsys.readouterr().err
    train(seed)
    assert capsys.readouterr().err.count("loader (Tensor): holds other data in memory") == lines
