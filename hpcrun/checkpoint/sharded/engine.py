"""Asynchronous saves, and restores onto any number of ranks.

Training waits only for the copy of this rank's shard into reused host memory. A thread does the rest: the
temporary folder, the writes, the agreement of the ranks, the commit and the pruning. A thread is enough: it
spends its time in a few large system calls and hashes, which release Python's lock, and with direct I/O it
needs hardly any processor time (``tools/bench/checkpoint.py`` measures both). The thread has a process group
for its collectives, so that they cannot mix with those of training. A save that takes too long cannot end
training either: after a timeout, gloo closes all connections of the group.
"""

import datetime
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hpcrun.checkpoint.memory.copies import MemoryCopies
from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.sharded import restore
from hpcrun.checkpoint.sharded.commit import CommitProtocol, SaveJob
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.checkpoint.sharded.plan import WritePlan, describe, make_plan
from hpcrun.checkpoint.sharded.rank_file import (
    RankShard,
    own_name,
    pack,
    stage,
)
from hpcrun.checkpoint.sharded.restore import SHARED, Template
from hpcrun.checkpoint.state.capture import plain
from hpcrun.checkpoint.state.tree import split
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.tree_group import new_control_group
from hpcrun.storage.errors import CheckpointError, amount
from hpcrun.storage.store import CheckpointStore

_SAME, _CHANGED, _FAILED = range(3)

WRITERS = "hpcrun checkpoint writers"
"""Name of the process group of the save thread; its timeout belongs to the saves."""


class CheckpointEngine:
    """Saves and restores the state of a run on all its ranks.

    Construction is collective: with several ranks it creates a process group for the writes.

    Args:
        ranks: all ranks, with a control group that the calling thread uses.
        still_mine: raises OwnedByAnotherAttempt if a newer attempt owns the run; called on rank 0.
        after_commit: called by rank 0 after a commit; see :mod:`hpcrun.storage.retention`.
        staging: host memory for the snapshots.
        memory: copies of the snapshots in the memory of the nodes, with their own staging memory.
        timeout: seconds that the ranks' disks may differ before a save is given up.

    Attributes:
        store: the store of the checkpoints; it remembers proven damage.
        ranks: the ranks; a call that fails on one of them raises CheckpointError on the others.
        staging: the host memory of the snapshots.
        patience: seconds that a rank which leaves waits for a save in which another rank may never take part.
    """

    def __init__(
        self,
        store: CheckpointStore,
        ranks: Ranks,
        *,
        still_mine: Callable[[], None],
        after_commit: Callable[[int], None],
        staging: Staging | None = None,
        memory: MemoryCopies | None = None,
        timeout: float = 1800.0,
    ) -> None:
        self.store, self._memory = store, memory
        self.staging = staging or Staging()
        if memory is not None:
            self.staging = memory.buffers
        self.ranks = writers = replace(ranks, peer_error=CheckpointError)
        if ranks.world_size > 1:
            limit = datetime.timedelta(seconds=timeout)
            group = new_control_group(timeout=limit, description=WRITERS)
            writers = replace(writers, group=group)
        self._protocol = CommitProtocol(store, writers, still_mine, after_commit, memory)
        self._key: Any = None
        self._plan: WritePlan | None = None
        self._thread: threading.Thread | None = None
        self._ended: list[SaveOutcome] = []
        self._unreported: list[SaveOutcome] = []
        self._begun = False
        self.patience = 60.0

    def start(
        self,
        step: int,
        shared: dict[str, Any],
        own: dict[str, Any],
        meta: dict[str, Any],
        alike: Callable[[str], bool] = lambda _: False,
        trouble: Exception | None = None,
        disk: bool = True,
        memory: bool = True,
    ) -> None:
        """Take a snapshot of the state after ``step``, and save it asynchronously. Collective.

        Waits for a pending save first, so that at most one save is pending and none is skipped. If the
        snapshot exceeds the memory budget, the call returns after the commit.

        Args:
            shared: the state of all ranks: sharded tensors, whole tensors, plain data.
            own: the state of this rank: plain data and small tensors.
            meta: plain JSON for the manifest; rank 0's is written.
            alike: returns True if the whole tensor of this name has the same value on all ranks. Any rank
                may then write it; otherwise rank 0 does.
            trouble: the reason why this rank has no state; the save then fails on all ranks.
            disk: False: keep the snapshot only in memory; see :meth:`ready_for_memory`.
            memory: keep the snapshot in the memory of the nodes, if there is such memory.

        Raises:
            CheckpointError: no save can write this state, for example if shards do not cover a tensor.
                On all ranks.
        """
        began = time.perf_counter()
        ended = self._join()
        self._unreported += [ended] if ended else []
        job = self._snapshot(step, shared, own, meta, alike, trouble)
        job = replace(job, disk=disk, memory=memory)
        straight = isinstance(job.share, RankShard) and not job.share.safe
        stalled = time.perf_counter() - began

        def work() -> None:
            try:
                outcome = self._protocol.run(job)
            except Exception as error:  # an exception of a thread would be lost
                named = isinstance(error, CheckpointError)
                line = str(error) if named else self.ranks.named(error)
                outcome = SaveOutcome(False, step, error=line, in_memory=not disk)
            seconds = time.perf_counter() - began
            outcome = self._protocol.copy(job, outcome)
            if straight:
                budget, here = amount(self.staging.budget()), amount(_size(job))
                note = f"training waited for this save: {here} exceed the memory budget of {budget}"
                outcome = replace(outcome, notes=(*outcome.notes, note))
            self._ended.append(
                replace(
                    outcome,
                    seconds=seconds,
                    stalled=seconds if straight else stalled,
                    staged=self.staging.size,
                )
            )

        if straight:
            work()
            return
        self._thread = threading.Thread(target=work, name=f"save step {step}", daemon=True)
        self._thread.start()

    def poll(self) -> list[SaveOutcome]:
        """Return the saves that have ended since the last call. Does not wait; differs between ranks."""
        if not self.under_way:
            ended = self._join()
            self._unreported += [ended] if ended else []
        reported, self._unreported = self._unreported, []
        return reported

    def require_restored(self, remedy: str) -> None:
        """Require that :meth:`restore` was called, or that the folder has no steps. Collective at first.

        Args:
            remedy: the call that restores the checkpoints.

        Raises:
            CheckpointError: the folder holds steps that this engine did not restore. On all ranks.
        """
        if not self._begun:
            self.ranks.from_rank_0(lambda: self.store.require_none(remedy))
            self._begun = True

    @property
    def under_way(self) -> bool:
        """True while a save is pending. Differs between ranks."""
        return self._thread is not None and self._thread.is_alive()

    def ready_for_memory(self) -> bool:
        """Return True if a snapshot may be kept in memory only: no rank has a pending save. Collective."""
        if self._memory is None:
            return False
        busy = self.under_way or not self._memory.active
        return self._agree(int(busy)) == 0

    def wait(self, patience: float | None = None) -> list[SaveOutcome]:
        """Wait for the pending save, and return as :meth:`poll`; the result is the same on all ranks.

        ``patience``: seconds to wait if another rank may never take part in the save; None: no limit.
        """
        if self._thread is not None:
            self._thread.join(patience)
        return self.poll()

    def save(self, *state: Any, **options: Any) -> SaveOutcome:
        """Save with the arguments of :meth:`start`, wait, and return the result."""
        self.start(*state, **options)
        return self.wait()[-1]

    def restore(self, template: Template, skip: Collection[int] = ()) -> Restored | None:
        """Restore the newest state that every rank can read; see :mod:`hpcrun.checkpoint.sharded.restore`.

        The first call may read it from the memory of the nodes.

        Raises:
            RuntimeError: the memory has a damaged state, and the disk has none; on all ranks.
        """
        restored: Restored | None = None
        notes: list[str] = []
        if self._memory is not None and not self._begun and not skip:
            restored, notes = self._memory.restore(self.store, self.ranks, template)
        if restored is None:
            restored = restore.restore(self.store, self.ranks, template, skip)
        if restored is None and notes:
            # Parts of the failed restore may be in the tensors, and nothing replaces them.
            raise RuntimeError(
                f"{notes[0]}; no checkpoint is on disk; start again to begin at step 0"
            )
        self._begun = True
        return restored and replace(restored, notes=(*notes, *restored.notes))

    def _join(self) -> SaveOutcome | None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._ended.pop() if self._ended else None

    def _snapshot(
        self,
        step: int,
        shared: dict[str, Any],
        own: dict[str, Any],
        meta: dict[str, Any],
        alike: Callable[[str], bool],
        trouble: Exception | None,
    ) -> SaveJob:
        ranks = self.ranks
        skeleton: Any = None
        tensors: dict[str, torch.Tensor] = {}
        blobs: dict[str, bytes] = {}
        key = b""
        try:
            if trouble is not None:
                raise trouble
            skeleton, tensors = split(shared)
            if ranks.rank == 0:
                blobs[SHARED] = pack(plain(skeleton))
            blobs[own_name(ranks.rank)] = pack(plain(own))
            key = describe(tensors, alike)
            state = _SAME if key == self._key else _CHANGED
        except Exception as error:  # of any type: the other ranks wait for this rank's report
            trouble, state = error, _FAILED
        state = self._agree(state)
        share: RankShard | str | None = None
        if state == _CHANGED:
            self._key, self._plan = None, None
            # An error here, on all ranks, ends the training: no later save could succeed.
            self._plan = make_plan(key, tensors, ranks)
            self._key = key
        try:
            if trouble is not None:
                raise trouble
            if state != _FAILED and self._plan is not None:
                share = stage(self._plan, tensors, blobs, self.staging)
        except Exception as error:  # the save reports it with the other ranks' errors
            share = ranks.named(error)
        return SaveJob(step, self._plan, share, meta)

    def _agree(self, state: int) -> int:
        if self.ranks.world_size == 1:
            return state
        value = torch.tensor([state], dtype=torch.int32)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.ranks.group)
        return int(value[0])


def _size(job: SaveJob) -> int:
    return job.share.size if isinstance(job.share, RankShard) else 0
