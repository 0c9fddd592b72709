"""Damaged checkpoints are renamed by the training run that continues without them."""

from pathlib import Path

import torch

from hpcrun.cli.main import guarded
from hpcrun.storage.store import CheckpointStore
from tests.checkpoint import faults
from tests.checkpoint.single_rank import engine


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def nothing(entries, skeleton):
    return {}


def saved(root: Path, *steps: int, owner: str = "7-0") -> None:
    writer = engine(root, owner, keep=9)
    for step in steps:
        outcome = writer.save(step, {"x": torch.full((100,), float(step))}, {}, {})
        assert outcome.ok, outcome.error


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_a_skipped_checkpoint_is_renamed_by_the_next_save(tmp_path, capsys) -> None:
    root = tmp_path / "checkpoints"
    saved(root, 1, 2, 3)
    flip(root / "step-000000003" / "rank-00000.bin")
    reader = engine(root, "7-1")
    restored = reader.restore(nothing)
    assert restored is not None
    assert restored.step == 2
    # A restore without a save may be an evaluation, which changes nothing.
    assert names(root) == ["step-000000001", "step-000000002", "step-000000003"]
    outcome = reader.save(3, {"x": torch.zeros(100)}, {}, {})
    assert outcome.ok
    (aside,) = [name for name in names(root) if name.startswith("damaged-step-000000003-")]
    assert outcome.notes == (
        f"step 3 is damaged and was renamed to {aside} (the newest 2 such folders are kept)",
    )
    # keep=2 counts only valid checkpoints.
    assert names(root) == [aside, "step-000000002", "step-000000003"]
    assert CheckpointStore(root, "7-2").quarantined() == [aside]
    assert guarded(["verify", str(root)]) == 0
    told = capsys.readouterr().out
    assert f"{aside}: damaged, in quarantine: no resume reads this folder" in told
    assert "DAMAGED" not in told


def test_two_damaged_checkpoints_are_kept(tmp_path, monkeypatch) -> None:
    now = 1000.0
    monkeypatch.setattr("hpcrun.storage.store.time.time", lambda: now)
    store = CheckpointStore(tmp_path, "7-0")
    for step in (5, 9, 7):
        now += 1
        faults.save(store, step)
        store.prove(step)
        store.quarantine_damaged()
    assert names(tmp_path) == ["damaged-step-000000007-1003", "damaged-step-000000009-1002"]
    assert store.steps() == []
    assert store.quarantine_damaged() == []
