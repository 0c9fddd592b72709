"""A real file system that loses power keeps every announced commit."""

import contextlib
import fcntl
import os
import random
import subprocess

import pytest
import torch

from hpcrun.storage.disk import FileSystem
from hpcrun.storage.store import CheckpointStore

from .single_rank import engine, restored

_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = (
    b"\x02\x00\x00\x00"  # discards all data that is not durable yet (ext4's EXT4_GOING_FLAGS)
)
TRIALS = 12

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def mounted(image, place):
    mount = ["mount", "-o", "loop,nobarrier,commit=600", str(image), str(place)]
    subprocess.run(mount, check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def disk(tmp_path):
    """Make an ext4 image and its mount point."""
    image, place = tmp_path / "image", tmp_path / "mnt"
    place.mkdir()
    with image.open("wb") as stream:
        stream.truncate(96 << 20)
    made = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mkfs.ext4", "-q", str(image)], capture_output=True, check=False
        ).returncode
    )
    if made:
        try:
            with mounted(image, place):
                return image, place
        except subprocess.CalledProcessError:
            made = False
    pytest.skip("needs root, loop devices and ext4")


class Cut(FileSystem):
    """Cuts the power before the n-th call that changes something; every later call fails."""

    def __init__(self, place, number):
        self._place, self.left = place, number

    def count(self):
        self.left -= 1
        if self.left == 0:
            folder = os.open(self._place, os.O_RDONLY)
            fcntl.ioctl(folder, _EXT4_IOC_SHUTDOWN, _NO_LOG_FLUSH)
            os.close(folder)

    def __getattribute__(self, name):
        if name in ("create", "create_direct", "write", "fsync", "rename", "unlink"):
            self.count()
        return super().__getattribute__(name)


def save_until_dark(root, fs):
    """Save step after step; return the announced steps."""
    saving = engine(root, "7-0", fs)
    announced = []
    for step in range(1, 9):
        state = {"w": torch.full((1_100_000,), float(step))}
        if not saving.save(step, state, {"step": step}, {}).ok:
            break
        announced.append(step)
    return announced


def test_a_power_loss_loses_no_announced_commit(disk):
    image, place = disk
    draw = random.Random("power")
    survived = []
    for _ in range(TRIALS):
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
        fs = Cut(place, draw.randrange(5, 150))
        with mounted(image, place):
            announced = save_until_dark(place / "checkpoints", fs)
            if fs.left > 0:
                fs.left = 1
                fs.count()
        with mounted(image, place):
            root = place / "checkpoints"
            found = restored(root)
            if announced:
                assert found is not None
                assert found.step >= announced[-1]
                for step in announced[-2:]:
                    CheckpointStore(root, "7-9").check(step)
            if found is not None:
                assert torch.equal(found.shared["w"], torch.full((1_100_000,), float(found.step)))
        survived.append((len(announced), None if found is None else found.step))
    print(f"(announced, restored) in {TRIALS} power cuts: {survived}")
    assert any(count for count, _ in survived)
