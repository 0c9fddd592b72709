"""An engine of a single rank, and small states that contain their step."""

import torch

from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.ranks.collective import Ranks
from hpcrun.storage.disk import FileSystem
from hpcrun.storage.retention import Retention, pruning
from hpcrun.storage.store import CheckpointStore

SIZE = 20_000


def engine(root, owner, fs=None, *, keep=2, patience=0.0, **more) -> CheckpointEngine:
    """Return an engine without a process group, by default without waits for slow file systems."""
    store = CheckpointStore(root, owner, fs=fs or FileSystem(), patience=patience)
    return CheckpointEngine(
        store,
        Ranks(),
        still_mine=lambda: None,
        after_commit=pruning(store, Retention(keep)),
        **more,
    )


def state(step):
    """Return the shared state after ``step`` steps."""
    return {
        "model": {"w": torch.full((SIZE,), float(step)), "b": torch.arange(7) + step},
        "plain": {"step": step, "text": "ü"},
    }


def save(saving: CheckpointEngine, step) -> SaveOutcome:
    """Save the state of ``step``."""
    return saving.save(step, state(step), {"rank": 0}, {"step": step})


def restored(root, owner="7-9") -> Restored | None:
    """Restore as a new attempt."""
    return engine(root, owner).restore(nothing)


def nothing(entries, skeleton):
    """Return a template that creates all tensors."""
    return {}


def require_state(found, step):
    """Assert that ``found`` equals the state of ``step``."""
    assert found.step == step
    for name, value in state(step)["model"].items():
        assert torch.equal(found.shared["model"][name], value)
    assert found.shared["plain"] == {"step": step, "text": "ü"}
