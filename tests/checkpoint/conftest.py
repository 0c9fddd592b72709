"""A store to break."""

import pytest

from hpcrun.checkpoint.storage.store import CheckpointStore


@pytest.fixture
def root(tmp_path):
    """Where a store may be made."""
    return tmp_path / "checkpoints"


@pytest.fixture
def store(root):
    """An empty store that does not wait for slow file systems."""
    return CheckpointStore(root, "7-0", patience=0)
