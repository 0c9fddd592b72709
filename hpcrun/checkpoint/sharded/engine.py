"""Saving beside the training and restoring onto any number of ranks.

Training waits for one thing: the copy of this rank's share into reused host memory. Everything else
(the draft, the bytes on disk, the ranks' agreement, the commit, the pruning) happens in a thread. A thread
and not a process: it spends its time in a few large system calls and hashes, during which Python's lock
is free, and with direct I/O it takes hardly any processor time (``tools/bench/checkpoint.py`` measures
both). The thread talks to the other ranks on a group of its own. Its collectives cannot get
between those of training, and a save that takes too long cannot end training: after a time-out gloo
closes all connections of the group.
"""

import datetime
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.sharded import restore
from hpcrun.checkpoint.sharded.collective import Together, one_line
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.checkpoint.sharded.node_staging import Stage
from hpcrun.checkpoint.sharded.plan import Plan, make_plan, signature
from hpcrun.checkpoint.sharded.rank_file import Share, own_name, pack, stage, to_stage
from hpcrun.checkpoint.sharded.restore import SHARED, Template
from hpcrun.checkpoint.sharded.save import Saving, Task
from hpcrun.checkpoint.state.capture import require_plain
from hpcrun.checkpoint.state.tree import split
from hpcrun.checkpoint.storage.errors import CheckpointError, amount
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.control.making import new_control_group

_SAME, _CHANGED, _FAILED = range(3)

WRITERS = "hpcrun checkpoint writers"
"""What the group is called whose limit is a save's own, whatever limits the others are given."""


class CheckpointEngine:
    """Saves and restores one run's state, with all its ranks.

    Args:
        group: a control group of all ranks, used from the calling thread; None for a single rank.
        still_mine: raises Superseded when a newer incarnation owns the run; asked by rank 0.
        tidy: called by rank 0 after the commit of a step; see :mod:`hpcrun.checkpoint.storage.retention`.
        staging: the memory that snapshots are held in.
        stage: a fast folder of this node that a snapshot goes on to, before the slower shared disk.
        timeout: seconds that the ranks' disks may differ by before a save is given up.

    Making one is collective: with several ranks it makes a group of its own for the writing.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        rank: int,
        world_size: int,
        group: Any,
        still_mine: Callable[[], None],
        tidy: Callable[[int], list[str]],
        staging: Staging | None = None,
        stage: Stage | None = None,
        timeout: float = 1800.0,
    ) -> None:
        self._store = store
        self._staging = staging or Staging()
        self._stage = stage
        self._together = Together(rank, world_size, group)
        beside = None
        if world_size > 1:
            limit = datetime.timedelta(seconds=timeout)
            beside = new_control_group(timeout=limit, description=WRITERS)
        self._saving = Saving(store, Together(rank, world_size, beside), still_mine, tidy)
        self._key: Any = None
        self._plan: Plan | None = None
        self._thread: threading.Thread | None = None
        self._ended: list[SaveOutcome] = []
        self._untold: list[SaveOutcome] = []

    def start(
        self,
        step: int,
        shared: dict[str, Any],
        own: dict[str, Any],
        meta: dict[str, Any],
        alike: Callable[[str], bool] = lambda _: False,
        trouble: Exception | None = None,
    ) -> None:
        """Take a snapshot of the state after ``step`` and save it beside what follows. Collective.

        A save that is still under way is waited for first: there is never more than one, and none
        is left out. Where the snapshot does not fit the memory budget, this returns when it lies in the
        stage folder, and without one after the commit.

        Args:
            shared: what all ranks have in common: sharded tensors, whole ones, plain data.
            own: this rank's: plain data and small tensors.
            meta: plain JSON for the manifest; only rank 0's is written.
            alike: whether a whole tensor of this name has the same value on all ranks, so that any of
                them may write it; otherwise rank 0 does.
            trouble: why this rank has no state to give; the save then fails, on all ranks alike.
        """
        began = time.perf_counter()
        ended = self._join()
        self._untold += [ended] if ended else []
        waited = time.perf_counter() - began
        task = self._snapshot(step, shared, own, meta, alike, trouble)
        if isinstance(task.share, Share) and not task.share.safe:
            task = self._through_stage(task)
        straight = isinstance(task.share, Share) and not task.share.safe
        stalled = time.perf_counter() - began

        def work() -> None:
            saved = task if straight else self._through_stage(task)
            try:
                outcome = self._saving.run(saved)
            except Exception as error:  # a thread's exception would go nowhere
                told = isinstance(error, CheckpointError)
                line = str(error) if told else self._together.named(error)
                outcome = SaveOutcome(False, step, error=line)
            finally:
                if isinstance(saved.share, Share) and saved.share.stored is not None:
                    saved.share.stored.close()
            seconds = time.perf_counter() - began
            if straight:
                budget, here = amount(self._staging.budget()), amount(_size(task))
                note = f"written while training waited: {here} exceed the memory budget of {budget}"
                outcome = replace(outcome, notes=(*outcome.notes, note))
            self._ended.append(
                replace(
                    outcome,
                    seconds=seconds,
                    stalled=seconds if straight else stalled,
                    waited=waited,
                    staged=self._staging.size,
                )
            )

        if straight:
            work()
            return
        self._thread = threading.Thread(target=work, name=f"save step {step}", daemon=True)
        self._thread.start()

    def poll(self) -> list[SaveOutcome]:
        """The saves that have ended and were not told yet. Does not wait; differs between ranks."""
        if not self.under_way:
            ended = self._join()
            self._untold += [ended] if ended else []
        told, self._untold = self._untold, []
        return told

    @property
    def store(self) -> CheckpointStore:
        """The folder's checkpoints, with what was learned of them so far."""
        return self._store

    def require_no_steps(self, remedy: str) -> None:
        """On all ranks, refuse what :meth:`CommittedSteps.require_none` refuses. Collective."""
        self._together.from_rank_0(lambda: self._store.require_none(remedy))

    @property
    def under_way(self) -> bool:
        """Whether a save is. Differs between ranks."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, patience: float | None = None) -> list[SaveOutcome]:
        """As :meth:`poll`, once nothing is under way: then it is the same on all ranks.

        ``patience``: seconds to wait, where a peer may never come to the save; None: as long as it takes.
        """
        if self._thread is not None:
            self._thread.join(patience)
        return self.poll()

    def save(
        self,
        step: int,
        shared: dict[str, Any],
        own: dict[str, Any],
        meta: dict[str, Any],
        alike: Callable[[str], bool] = lambda _: False,
    ) -> SaveOutcome:
        """:meth:`start`, and wait for the end of it."""
        self.start(step, shared, own, meta, alike)
        return self.wait()[-1]

    def restore(self, template: Template, skip: Collection[int] = ()) -> Restored | None:
        """The newest state that every rank can read; see :mod:`hpcrun.checkpoint.sharded.restore`."""
        return restore.restore(self._store, self._together, template, skip)

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
    ) -> Task:
        together = self._together
        skeleton: Any = None
        tensors: dict[str, torch.Tensor] = {}
        blobs: dict[str, bytes] = {}
        try:
            if trouble is not None:
                raise trouble
            skeleton, tensors = split(shared)
            require_plain(own, "")
            if together.rank == 0:
                require_plain(skeleton, "")
                blobs[SHARED] = pack(skeleton)
            blobs[own_name(together.rank)] = pack(own)
            key = signature(tensors)
            state = _SAME if key == self._key else _CHANGED
        except Exception as error:  # whatever it is, the others are waiting to hear
            trouble, key, state = error, None, _FAILED
        state = self._agree(state)
        share: Share | str | None = None
        try:
            if state == _CHANGED:
                self._key, self._plan = None, None
                self._plan = make_plan(tensors, alike, together)
                self._key = key
            if trouble is not None:
                raise trouble
            if state != _FAILED and self._plan is not None:
                share = stage(self._plan, tensors, blobs, self._staging)
        except Exception as error:  # told by the save, together with the other ranks' troubles
            share = together.named(error)
        return Task(step, self._plan, share, meta)

    def _through_stage(self, task: Task) -> Task:
        """``task`` with its share in the stage folder; as it is where there is none, or it is full."""
        share = task.share
        if self._stage is None or not isinstance(share, Share) or share.stored is not None:
            return task
        try:
            stored = to_stage(share, self._stage)
        except Exception as error:  # what is wrong with the share itself, its writing will tell
            note = f"{one_line(error)}; written straight to {self._store.root}"
            return replace(task, notes=(*task.notes, note))
        if share.image is not None:
            self._staging.offer()
        return replace(task, share=stored)

    def _agree(self, state: int) -> int:
        if self._together.world_size == 1:
            return state
        value = torch.tensor([state], dtype=torch.int32)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._together.group)
        return int(value[0])


def _size(task: Task) -> int:
    return task.share.size if isinstance(task.share, Share) else 0
