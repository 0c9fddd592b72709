"""Fixtures: a folder for a store, and an empty store."""

import pytest

from hpcrun.storage.store import CheckpointStore


@pytest.fixture
def root(tmp_path):
    """Return a folder for a store."""
    return tmp_path / "checkpoints"


@pytest.fixture
def store(root):
    """Return an empty store that does not wait for slow file systems."""
    return CheckpointStore(root, "7-0", patience=0)


@pytest.fixture
def folder(rank, world_size, root):
    """Return the store of a test on several ranks, as this rank uses it."""
    from .rank_folder import RankFolder  # A test on one rank needs no torch.

    return RankFolder(root, rank, world_size)
