"""Commits and the agreed stop of a training with the checkpoints of a framework."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from hpcrun.checkpoint.lone_save import watch_saves
from hpcrun.integrations.checkpoint_folders import CheckpointFolders
from hpcrun.ranks.signals import StopReason
from hpcrun.ranks.tree_group import new_control_group
from hpcrun.storage.errors import explained
from hpcrun.train.own_loop.session import Stop


class FolderSession(Stop):
    """Checkpoint folders and stop of a training with checkpoints of a framework. Every method is collective.

    The arguments are those of :class:`CheckpointFolders`; the number of ranks is added to ``facts``.
    """

    def __init__(self, root: Path, *, keep: int | None, facts: dict[str, Any]) -> None:
        super().__init__()
        size = self.ranks.world_size
        if size > 1:
            watch_saves()
        commits = replace(self.ranks, group=new_control_group() if size > 1 else None)
        facts = {"the number of ranks": size, **facts}
        self.folders = CheckpointFolders(root, self.ranks, commits, keep=keep, facts=facts)

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """Return step and own state of the newest valid checkpoint; None without a checkpoint.

        Raises:
            CheckpointError: as :meth:`CheckpointFolders.newest`.
        """
        step = self.folders.newest()
        if step is None:
            return None
        with explained("be read", self._own(step)):
            own: dict[str, Any] = torch.load(self._own(step), weights_only=True)
        self.say(f"resumed after step {step} from {self.folders.path(step)}")
        return step, own

    def commit(self, step: int, own: dict[str, Any], protect: Path | None = None) -> None:
        """Add this rank's ``own`` state to the folder of ``step``, and commit the folder in a thread."""
        torch.save(own, self._own(step))
        self.folders.commit(step, protect)

    def leave(self, step: int, reason: StopReason) -> NoReturn:
        """Wait for the commit of ``step``, and end the program with exit code 75.

        Raises:
            SystemExit: always, with the code 75, unless the commit failed.
            CheckpointError: the commit failed. Raised on all ranks.
        """
        self.finish()
        self.end(step, reason)

    def finish(self) -> None:
        """Wait for the commit in progress, and release the folder; raises CheckpointError if it failed."""
        self.agreement.finish()
        self.folders.close()

    def _own(self, step: int) -> Path:
        return self.folders.path(step) / f"hpcrun-rank-{self.ranks.rank}.pt"
