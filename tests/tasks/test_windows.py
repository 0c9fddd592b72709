"""Samples are pieces of the corpus at fixed places, readable in any process."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from hpcrun.tasks.language_model import ByteWindows


@pytest.fixture
def windows(packed) -> ByteWindows:
    return ByteWindows(packed, "train", packed.train_bytes, 16)


def test_the_windows_put_together_are_the_text_but_for_what_fills_no_window(windows, packed):
    text = packed.open("train").tobytes()
    joined = b"".join(bytes(windows[i][:-1].tolist()) for i in range(len(windows)))
    assert joined == text[: len(joined)]
    assert 0 <= len(text) - 1 - len(joined) < 16


def test_the_last_byte_of_a_window_is_the_first_of_the_next(windows):
    assert all(windows[i][-1] == windows[i + 1][0] for i in range(len(windows) - 1))


def test_a_window_is_one_byte_longer_than_the_context(windows):
    assert windows[0].shape == (17,)
    assert windows[0].dtype == torch.uint8


@pytest.mark.parametrize(("size", "count"), [(2, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_a_text_has_a_window_for_every_context_and_the_byte_after_it(packed, size: int, count: int):
    assert len(ByteWindows(packed, "train", size, 16)) == count


@pytest.mark.parametrize("index", [-1, 10**9])
def test_an_index_outside_is_an_error_and_never_another_sample(windows, index: int):
    with pytest.raises(IndexError):
        windows[index]


def test_a_copy_sent_to_another_process_reads_the_same(windows):
    expected = windows[3]
    assert torch.equal(pickle.loads(pickle.dumps(windows))[3], expected)


def test_a_loader_with_a_worker_process_gives_the_same_batches(windows):
    def batches(workers: int) -> torch.Tensor:
        return torch.cat(list(DataLoader(windows, batch_size=8, num_workers=workers)))

    assert torch.equal(batches(1), batches(0))
