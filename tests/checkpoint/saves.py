"""Program of the network file system's tests: saves step after step, and prints each result.

``python -m tests.checkpoint.saves FOLDER OWNER FIRST LAST PAUSE`` prints ``writing 3`` while it writes the
file of step 3, and ``saved 3`` or ``failed 3: why``. It pauses between the parts of a file, so that a test
can act in the middle of a save.
``python -m tests.checkpoint.saves FOLDER`` checks every checkpoint and restores the newest: ``whole 1 2 3``.
"""

import sys
import time
from pathlib import Path

import torch

from hpcrun.storage.disk import FileSystem
from hpcrun.storage.store import CheckpointStore
from tests.checkpoint.single_rank import engine, nothing

SIZE = 1_500_000
PIECE = 1 << 18


class Paced(FileSystem):
    """Splits large writes, pauses before each part, and prints a line after the first part."""

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self.step = 0

    def write(self, descriptor, data):
        if len(data) <= PIECE:
            return super().write(descriptor, data)
        time.sleep(self._pause)
        count = super().write(descriptor, data[:PIECE])
        if len(data) > 4 * SIZE - PIECE // 2:
            print(f"writing {self.step}", flush=True)
        return count


def main(root: Path, owner: str, first: int, last: int, pause: float) -> None:
    """Save the steps from ``first`` to ``last``."""
    fs = Paced(pause)
    saving = engine(root, owner, fs, keep=1000, patience=3.0)
    for fs.step in range(first, last + 1):
        step = fs.step
        state = {"w": torch.full((SIZE,), float(step))}
        outcome = saving.save(step, state, {"step": step}, {})
        print(f"saved {step}" if outcome.ok else f"failed {step}: {outcome.error}", flush=True)
        if not outcome.ok:
            time.sleep(0.2)


def check(root: Path) -> None:
    """Check all checkpoints of the folder."""
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
