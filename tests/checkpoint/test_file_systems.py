"""Cluster file systems: late names, stale handles, striping, full disks."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from hpcrun.checkpoint.sharded.rank_file import StoreReader
from hpcrun.checkpoint.storage.disk import FileSystem
from hpcrun.checkpoint.storage.errors import CheckpointError, DamagedCheckpoint
from hpcrun.checkpoint.storage.store import CheckpointStore

from . import faults
from .single_rank import engine, save, state


def test_too_little_space_is_reported_with_figures_before_any_write(
    tmp_path,
):
    class Small(FileSystem):
        room = 50_000

        def free(self, path):
            return self.room

    fs = Small()
    saving = engine(tmp_path / "checkpoints", "7-0", fs)
    outcome = save(saving, 1)
    assert not outcome.ok
    figures = re.search(
        r"a checkpoint needs (\S+) kB \((\S+) kB of tensors, (\S+) kB of other state\); 50\.0 kB are "
        r"free, (\S+) kB too little; free some space, or lower checkpoint\.keep$",
        outcome.error,
    )
    needs, tensors, other, missing = map(float, figures.groups())
    assert tensors == 80.1  # 20,000 numbers of four bytes, and seven of eight
    assert needs == pytest.approx(tensors + other, abs=0.11)
    assert missing == pytest.approx(needs - 50, abs=0.11)
    assert not (tmp_path / "checkpoints").exists()
    fs.room = 10**9
    assert save(saving, 1).ok
    assert save(saving, 2).bytes == pytest.approx(needs * 1000, rel=0.02)


def test_a_read_waits_for_a_name_that_appears_late(root):
    class Late(FileSystem):
        tries = 0

        def create(self, path):
            self.tries += 1
            if self.tries < 4:
                raise FileNotFoundError(2, os.strerror(2))
            return super().create(path)

    faults.save(CheckpointStore(root, "7-0", fs=Late()), 1)
    with pytest.raises(CheckpointError, match="No such file"):
        faults.save(CheckpointStore(root, "7-0", fs=Late(), patience=0), 2)


class Restarted(FileSystem):
    """A restarted server: the next ``left`` uses of a handle fail as stale."""

    left = 0

    def _use(self):
        if self.left:
            self.left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def size(self, descriptor):
        self._use()
        return super().size(descriptor)

    def read_into(self, descriptor, view, position):
        self._use()
        return super().read_into(descriptor, view[:30_000], position)

    def close(self, descriptor):
        super().close(descriptor)
        self._use()


def test_a_stale_handle_is_opened_again_within_a_bound(tmp_path):
    root = tmp_path / "checkpoints"
    assert save(engine(root, "7-0"), 1).ok
    fs = Restarted()
    store = CheckpointStore(root, "7-1", fs=fs, patience=2)
    fs.left = 4  # the manifest's first read, and the close and the reads after it
    assert store.newest_valid().step == 1
    assert fs.left == 0
    reader = StoreReader(store, 1)
    into = {"model/w": reader.empty("model/w")}
    fs.left = 3
    reader.load(into)
    assert fs.left == 0
    assert torch.equal(into["model/w"], state(1)["model"]["w"])
    before = len(list(Path("/proc/self/fd").iterdir()))
    fs.left = 10**9
    hopeless = CheckpointStore(root, "7-1", fs=fs, patience=0.1)
    with pytest.raises(DamagedCheckpoint, match="ESTALE"):
        StoreReader(hopeless, 1).load(into)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
