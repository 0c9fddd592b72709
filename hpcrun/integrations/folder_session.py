"""Commits, the agreed stop and the exit code of a training with checkpoints of a framework."""

from pathlib import Path
from typing import Any, NoReturn

import torch

from hpcrun.checkpoint.storage.errors import CheckpointError, explained
from hpcrun.integrations.checkpoint_folders import CheckpointFolders
from hpcrun.integrations.session import AGAIN, own_place
from hpcrun.printing import say_aside
from hpcrun.ranks.collective import Ranks, StopAgreement
from hpcrun.ranks.making import new_control_group
from hpcrun.ranks.signals import STOP, StopReason, end_helpers
from hpcrun.run.reports import report


class FolderSession:
    """Checkpoint folders and stop of a training on one process or all ranks of torch.distributed.

    Every method is collective. The constructor handles the stop signals, so call it in the main thread. The
    arguments are those of :class:`CheckpointFolders`; the number of ranks is added to ``facts``.
    """

    def __init__(self, root: Path, *, keep: int | None, facts: dict[str, Any]) -> None:
        rank, size = own_place()
        STOP.install()
        groups = [new_control_group() if size > 1 else None for _ in range(2)]
        self._ranks, commits = (Ranks(rank, size, group, CheckpointError) for group in groups)
        self._agreement = StopAgreement(groups[0])
        facts = {"the number of ranks": size, **facts}
        self.folders = CheckpointFolders(root, self._ranks, commits, keep=keep, facts=facts)

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
        self._say(f"resumed after step {step} from {self.folders.path(step)}")
        return step, own

    def reason(self, step: int) -> StopReason:
        """Report ``step``, and return the reason to stop that the ranks have agreed on, or NONE."""
        report(step)
        return self._agreement.exchange(step, STOP.reason)

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
        self._say(f"stopped after step {step} ({reason.name.lower()}), saved; exit code {AGAIN}")
        end_helpers()
        raise SystemExit(AGAIN)

    def finish(self) -> None:
        """Wait for the commit in progress, and release the folder; raises CheckpointError if it failed."""
        self._agreement.finish()
        self.folders.close()

    def _own(self, step: int) -> Path:
        return self.folders.path(step) / f"hpcrun-rank-{self._ranks.rank}.pt"

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            say_aside(f"hpcrun: {text}")
