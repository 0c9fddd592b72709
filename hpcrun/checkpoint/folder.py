"""The store and the engine of a folder of checkpoints in a user's own loop, without a run directory."""

import math
import os
import re
import secrets
from collections.abc import Callable
from operator import index
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hpcrun.checkpoint.lone_save import watch_saves
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.ranks.collective import Ranks
from hpcrun.run.reports import report
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.retention import Retention, pruning
from hpcrun.storage.store import CheckpointStore


def folder_store(folder: Path | str) -> CheckpointStore:
    """Return the store of ``folder``; a later chdir does not change its target."""
    return CheckpointStore(Path(folder).absolute(), _owner())


def folder_engine(
    store: CheckpointStore,
    ranks: Ranks,
    *,
    pinned: bool,
    still_mine: Callable[[], None] = lambda: None,
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
    if ranks.world_size > 1:
        watch_saves()
    prune = pruning(store, retention or Retention())

    def after_commit(step: int) -> None:
        report(step, saved=True)
        prune(step)

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
    plain = re.sub("[^A-Za-z0-9]", "-", job)[:64].strip("-") or "0"
    # Without a scheduler, two processes started by mistake would write to the same temporary folder.
    return f"{plain}-{secrets.token_hex(4)}"


def require_arguments(model: nn.Module, every: Any, minutes: Any, host_memory: Any) -> int:
    """Check the arguments, and return ``every`` as an int.

    Raises:
        CheckpointError: an argument has the wrong type or an impossible value.
    """
    for name, value in (("minutes", minutes), ("host_memory", host_memory)):
        number = isinstance(value, int | float) and math.isfinite(value) and value > 0
        if value is not None and not number:
            raise CheckpointError(f"{name}={value!r}: give a number above 0, or None")
    _require_named_weights(model)
    try:
        steps = index(every)
    except TypeError:
        steps = -1
    if steps < 0:
        raise CheckpointError(f"every={every!r}: give a whole number of steps; 0: no interval")
    return steps


def require_step(step: Any) -> int:
    """Return ``step`` as an int.

    Raises:
        TypeError: ``step`` is not an integer.
        CheckpointError: ``step`` is negative.
    """
    whole = index(step)
    if whole < 0:
        raise CheckpointError(f"step {whole}: cannot be negative")
    return whole


def _require_named_weights(model: nn.Module) -> None:
    """Refuse FSDP1: its flat parameters depend on the number of ranks."""
    for name, part in model.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise CheckpointError(
                f"model: {f'its {name}' if name else 'it'} is wrapped in FullyShardedDataParallel (FSDP1), "
                "and its flat weights have no names; use torch.distributed.fsdp.fully_shard (FSDP2) in "
                "place of FSDP1: fully_shard(block) for each block, then fully_shard(model), and make the "
                "optimizer after that"
            )
