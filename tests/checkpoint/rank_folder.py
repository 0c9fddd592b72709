"""A folder of checkpoints that several ranks use together: engines, small states, damage."""

import dataclasses

import torch
import torch.distributed as dist

from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.ranks.collective import Ranks
from hpcrun.run.record import OwnedByAnotherAttempt
from hpcrun.storage.disk import FileSystem
from hpcrun.storage.store import CheckpointStore

from .single_rank import nothing


def not_fenced():
    return None


def fenced():
    raise OwnedByAnotherAttempt("7-1 owns this run now; 7-0 stops writing")


class RankFolder:
    """A folder of checkpoints, as one of several ranks uses it. Construction is collective."""

    def __init__(self, root, rank, world_size):
        self.root, self.rank, self.world_size = root, rank, world_size
        self._group = dist.new_group(backend="gloo") if world_size > 1 else None

    def engine(
        self, fs=None, *, on=0, owner="7-0", still_mine=not_fenced, keep=3, group=None
    ) -> CheckpointEngine:
        """Return an engine with the file system ``fs`` on rank ``on``, and a normal one on other ranks."""
        whole = fs is None or self.rank != on
        store = CheckpointStore(self.root, owner, fs=FileSystem() if whole else fs, patience=0.5)

        return CheckpointEngine(
            store,
            Ranks(self.rank, self.world_size, group or self._group),
            still_mine=still_mine,
            after_commit=lambda step: store.prune(keep, protect=[step]),
        )

    def save(self, engine, step) -> SaveOutcome:
        """Save a small state; return the outcome without its times, which differ between ranks."""
        shared = {"weights": torch.full((1000,), float(step))}
        outcome = engine.save(step, shared, {"rank": self.rank, "step": step}, {"step": step})
        return dataclasses.replace(outcome, seconds=0.0, stalled=0.0, staged=0)

    def restore(self, engine) -> Restored | None:
        return engine.restore(nothing)

    def spoil(self, step, name, position=None):
        """Flip a bit of a file on rank 0, by default in the middle, while other ranks wait."""
        if self.rank == 0:
            path = self.root / f"step-{step:09d}" / name
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2 if position is None else position] ^= 16
            path.write_bytes(raw)
        dist.barrier()

    def names(self):
        """Return the names in the folder; all ranks list before any rank continues."""
        dist.barrier()
        found = sorted(entry.name for entry in self.root.glob("*"))
        dist.barrier()
        return found
