"""The program of the network file system's tests: saves step after step, and says how each ended.

``python -m tests.checkpoint.saves FOLDER OWNER FIRST LAST PAUSE`` says ``saved 3`` or ``failed 3: why``.
``python -m tests.checkpoint.saves FOLDER`` checks every checkpoint and restores the newest: ``whole 1 2 3``.
"""

import sys
import time
from pathlib import Path

import torch

from hpcrun.checkpoint.store import CheckpointStore
from tests.checkpoint.single import engine, nothing

SIZE = 1_500_000


def main(root: Path, owner: str, first: int, last: int, pause: float) -> None:
    """Save ``first`` to ``last``."""
    saving = engine(root, owner, keep=1000, patience=3.0)
    for step in range(first, last + 1):
        state = {"w": torch.full((SIZE,), float(step))}
        outcome = saving.save(step, state, {"step": step}, {})
        print(f"saved {step}" if outcome.ok else f"failed {step}: {outcome.error}", flush=True)
        time.sleep(pause)


def check(root: Path) -> None:
    """Check everything there."""
    store = CheckpointStore(root, "check-0")
    for step in store.steps():
        store.check(step)
    restored = engine(root, "check-1", patience=3.0).restore(nothing)
    assert restored is not None
    assert restored.step == store.steps()[0]
    assert torch.equal(restored.shared["w"], torch.full((SIZE,), float(restored.step)))
    print("whole", *reversed(store.steps()))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        check(Path(sys.argv[1]))
    else:
        folder, name, *numbers = sys.argv[1:]
        main(Path(folder), name, int(numbers[0]), int(numbers[1]), float(numbers[2]))
