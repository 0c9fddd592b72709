"""Cluster file systems: full disks, and names that appear late."""

import os
import re

import pytest

from hpcrun.checkpoint.storage.disk import FileSystem
from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.checkpoint.storage.store import CheckpointStore

from . import faults
from .single_rank import engine, save


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
