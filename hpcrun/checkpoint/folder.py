"""The store and the engine of a folder of checkpoints in a user's own loop, without a run directory."""

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.checkpoint.storage.retention import Retention, pruning
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.ranks.collective import Ranks
from hpcrun.run.reports import report


def folder_store(folder: Path | str) -> CheckpointStore:
    """Return the store of ``folder``; a later chdir does not change its target."""
    return CheckpointStore(Path(folder).absolute(), _owner())


def _anybody() -> None:
    """Raise nothing: without a run directory there is no newer attempt that could own the folder."""


def folder_engine(
    store: CheckpointStore,
    ranks: Ranks,
    *,
    pinned: bool,
    still_mine: Callable[[], None] = _anybody,
    retention: Retention | None = None,
    host_memory: float | None = None,
) -> CheckpointEngine:
    """Make the engine of ``store``. In a script that hpcrun started, it reports each commit. Collective.

    Args:
        ranks: all ranks, with their control group.
        pinned: True if the state is on an accelerator.
        still_mine: called on rank 0 before a commit; raises if another process owns the folder.
        retention: rule for the checkpoints to keep.
        host_memory: gigabytes (10^9 bytes) of host memory per rank for a snapshot; None: half of the free
            memory.
    """
    prune = pruning(store, retention or Retention())

    def after_commit(step: int) -> list[str]:
        report(step, saved=True)
        return prune(step)

    return CheckpointEngine(
        store,
        ranks,
        still_mine=still_mine,
        after_commit=after_commit,
        staging=Staging(
            limit=None if host_memory is None else int(host_memory * 1e9),
            ranks_on_host=ranks.on_this_host(),
            pinned=pinned,
        ),
    )


def _owner() -> str:
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or "0"
    restart = os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT")
    plain = re.sub("[^A-Za-z0-9]", "-", job)[:64].strip("-") or "0"
    # Without a scheduler, two processes started by mistake would write to the same temporary folder.
    return f"{plain}-{restart or 0}-{secrets.token_hex(3)}"
