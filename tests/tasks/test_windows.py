"""Samples are pieces of the corpus at fixed places, readable in any process."""

import multiprocessing
import os
import pickle
from pathlib import Path

import h5py
import pytest
import torch
from torch.utils.data import DataLoader

from hpcrun.tasks.windows import ByteWindows


@pytest.fixture
def windows(packed) -> ByteWindows:
    return ByteWindows(packed.path, "train", packed.train_bytes, 16)


def whole_text(path: Path) -> bytes:
    with h5py.File(path, "r") as file:
        return file["train/bytes"][...].tobytes()


def test_the_windows_put_together_are_the_text_but_for_what_fills_no_window(windows, packed):
    text = whole_text(packed.path)
    joined = b"".join(bytes(windows[i][:-1].tolist()) for i in range(len(windows)))
    assert joined == text[: len(joined)]
    assert 0 <= len(text) - 1 - len(joined) < 16


def test_the_last_byte_of_a_window_is_the_first_of_the_next(windows):
    assert all(windows[i][-1] == windows[i + 1][0] for i in range(len(windows) - 1))


def test_a_window_is_one_byte_longer_than_the_context(windows):
    assert windows[0].shape == (17,)
    assert windows[0].dtype == torch.uint8


@pytest.mark.parametrize(("size", "count"), [(2, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_a_text_has_a_window_for_every_context_and_the_byte_after_it(size: int, count: int):
    assert len(ByteWindows(Path("unread"), "train", size, 16)) == count


@pytest.mark.parametrize("index", [-1, 10**9])
def test_an_index_outside_is_an_error_and_never_another_sample(windows, index: int):
    with pytest.raises(IndexError):
        windows[index]


def test_a_copy_sent_to_another_process_reads_the_same(windows):
    expected = windows[3]
    assert torch.equal(pickle.loads(pickle.dumps(windows))[3], expected)


def test_a_forked_reader_opens_the_file_for_itself(windows):
    expected = windows[5].tolist()
    parent_handle = windows._bytes
    results = multiprocessing.get_context("fork").SimpleQueue()

    def read() -> None:
        sample = windows[5].tolist()
        results.put((sample, windows._bytes is not parent_handle, windows._opened_by))

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    process.join()
    assert results.get() == (expected, True, process.pid)
    assert windows._opened_by == os.getpid()


def test_a_loader_with_a_worker_process_gives_the_same_batches(windows):
    def batches(workers: int) -> torch.Tensor:
        return torch.cat(list(DataLoader(windows, batch_size=8, num_workers=workers)))

    assert torch.equal(batches(1), batches(0))
