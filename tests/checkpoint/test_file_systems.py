"""What file systems of clusters do: show names late, lose handles, stripe, have no room."""

import errno
import os
from pathlib import Path

import pytest
import torch

from hpcrun.checkpoint.errors import CheckpointError, DamagedCheckpoint
from hpcrun.checkpoint.filesystem import FileSystem
from hpcrun.checkpoint.lustre import is_lustre, setstripe_command, stripe
from hpcrun.checkpoint.reading import StoreReader
from hpcrun.checkpoint.store import CheckpointStore

from . import faults
from .single import engine, save, state


def test_a_disk_with_too_little_room_is_told_before_anything_is_written(tmp_path):
    class Small(FileSystem):
        def free(self, path):
            return 50_000

    watched = Small()
    outcome = save(engine(tmp_path / "checkpoints", "7-0", watched), 1)
    assert not outcome.ok
    assert "a checkpoint needs 8" in outcome.error
    assert "50.0 kB are free, 3" in outcome.error
    assert not (tmp_path / "checkpoints").exists()


def test_a_name_that_shows_late_is_waited_for(root):
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


def test_a_stale_handle_is_opened_again_while_reading(tmp_path):
    class Restarted(FileSystem):
        left = 3

        def read_into(self, descriptor, view, position):
            if self.left:
                self.left -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return super().read_into(descriptor, view[:30_000], position)

    root = tmp_path / "checkpoints"
    assert save(engine(root, "7-0"), 1).ok
    fs = Restarted()
    store = CheckpointStore(root, "7-1", fs=fs, patience=2)
    reader = StoreReader(store, 1)
    into = {"model/w": reader.empty("model/w")}
    reader.load(into)
    assert fs.left == 0
    assert torch.equal(into["model/w"], state(1)["model"]["w"])
    fs.left = 10**9
    hopeless = CheckpointStore(root, "7-1", fs=fs, patience=0.1)
    with pytest.raises(DamagedCheckpoint, match="ESTALE"):
        StoreReader(hopeless, 1).load(into)


def test_lustre_is_found_by_the_longest_mount_and_striped_by_its_own_tool(tmp_path, monkeypatch):
    mounts = (
        "/dev/a / ext4 rw 0 0\nmds@tcp:/fs /scratch lustre rw 0 0\nt /scratch/tmp tmpfs rw 0 0\n"
    )
    assert is_lustre(Path("/scratch/me/runs"), mounts)
    assert not is_lustre(Path("/scratch/tmp/runs"), mounts)
    assert not is_lustre(Path("/scratchy"), mounts)
    assert setstripe_command(Path("/s/d")) == ["lfs", "setstripe", "--stripe-count", "1", "/s/d"]
    tool = tmp_path / "lfs"
    tool.write_text('#!/bin/sh\necho "$@" >> "$0.log"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hpcrun.checkpoint.lustre.is_lustre", lambda *_: True)
    stripe(tmp_path)
    assert (tmp_path / "lfs.log").read_text() == f"setstripe --stripe-count 1 {tmp_path}\n"
