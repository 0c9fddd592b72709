"""Save checkpoints at intervals and at stops, and record them in the event log."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hpcrun.checkpoint.interval import EverySeconds, EverySteps, SaveInterval, young
from hpcrun.checkpoint.memory.copies import open_copies
from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.config import Config, changes_since
from hpcrun.errors import NotTrainable
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.run import record
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Cause, Ended, Saved, SaveFailed, Started
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import State
from hpcrun.run.record import OwnedByAnotherAttempt, require_ownership
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.lost import require_none_lost
from hpcrun.storage.retention import Retention, pruning
from hpcrun.storage.store import CheckpointStore
from hpcrun.train.data.batches import Steps
from hpcrun.train.metrics.log import MetricsLog
from hpcrun.train.step.trainer import AMPTrainer, DistributedAMPTrainer
from hpcrun.train.validation import EarlyStopping


class Saver:
    """Saves at the configured interval and at stops. After a failed save it reports, and training continues.

    Only one save runs at a time: the next save waits until the previous one is committed, so none is
    skipped. ``saved`` is the newest step known to be committed, ``failed`` the error of the last save or
    None, ``costs`` (seconds that training waited, seconds until the commit) of the last save.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        trainer: AMPTrainer,
        engine: CheckpointEngine,
        *,
        interval: SaveInterval,
        memory: SaveInterval,
        batches: Steps,
        early: EarlyStopping,
        metrics: MetricsLog,
        meta: dict[str, Any],
        saved: int | None,
    ) -> None:
        """``saved``: the newest step on disk. ``batches`` provides the position in the data.

        ``interval`` is that of the saves, ``memory`` that of the snapshots in memory only.
        A checkpoint holds the validation loss of its step, if ``early`` has one, and the
        unlogged part of ``metrics``.
        """
        self._run, self._attempt = run, attempt
        self._trainer, self._engine = trainer, engine
        self._interval, self._memory, self._meta = interval, memory, meta
        self._batches, self._early, self._metrics = batches, early, metrics
        self.saved = saved
        self.costs: tuple[float, float] | None = None
        self.failed: str | None = None
        self._last: SaveOutcome | None = None
        self._reports = trainer.is_main_process
        self._begun = False

    def due(self, done: int) -> bool:
        """Return True if it is time to save after ``done`` steps. Call it on every rank after every step."""
        return self._interval.due(done)

    def start(self, done: int, *, memory: bool = True) -> None:
        """Save the state after ``done`` steps; the commit happens in the background. Collective.

        ``memory``: keep a copy in memory too.

        Raises:
            OwnedByAnotherAttempt: a newer attempt owns the run now.
        """
        self._wait()
        if done != self.saved:
            self._begin(done, memory=memory)

    def due_in_memory(self, done: int) -> bool:
        """Return True if it is time for a snapshot in memory. Call it on every rank after every step."""
        return self._memory.due(done)

    def start_in_memory(self, done: int) -> None:
        """Keep the state after ``done`` steps in the memory of the nodes, in the background. Collective.

        Nothing happens while a save is pending, which keeps its own copy in memory.

        Raises:
            OwnedByAnotherAttempt: a newer attempt owns the run now.
        """
        if self._engine.ready_for_memory():
            self._wait()
            self._begin(done, disk=False, memory=True)

    def _begin(self, done: int, *, memory: bool, disk: bool = True) -> None:
        at = {"step": done, "samples": self._batches.batching.span(done).start}
        validation = {"validation_loss": self._early.loss} if self._early.seen == done else {}
        stream = self._batches.saved(done)
        extra = at | {
            "early_stopping": self._early.state_dict(),
            "metrics": self._metrics.saved(),
        }
        self._trainer.start_checkpoint(
            self._engine,
            done,
            extra | ({"stream": stream.shared} if stream.shared else {}),
            self._meta | at | validation,
            {"stream": stream.own} if stream.own else {},
            disk=disk,
            memory=memory,
        )
        self._begun = True

    def poll(self) -> None:
        """Report a save that has finished. Does not wait; does nothing on ranks other than 0."""
        if self._begun and self._reports:
            self._record(self._engine.poll())

    def finish(self, done: int) -> None:
        """Save the state after ``done`` steps; wait until it is committed or ``failed`` is set. Collective.

        This save keeps no copy in memory, for which the ranks would have to wait.

        Raises:
            OwnedByAnotherAttempt: a newer attempt owns the run now.
        """
        self.start(done, memory=False)
        self._wait()

    def _wait(self) -> None:
        """Wait for the current save, so that all ranks know the same outcome."""
        outcomes = self._engine.wait()
        self._record(outcomes)
        if self._last is not None and self._last.fenced:
            raise OwnedByAnotherAttempt(self._last.error)

    def _record(self, outcomes: list[SaveOutcome]) -> None:
        for outcome in outcomes:
            self._last, self._begun = outcome, False
            if outcome.in_memory:
                if self._reports and outcome.error and not outcome.fenced:
                    print(f"hpcrun: {outcome.error}", file=sys.stderr, flush=True)
                continue
            self.failed = None if outcome.ok else outcome.error or "unknown"
            if outcome.ok:
                self.saved = outcome.step
                self.costs = outcome.stalled, outcome.seconds
            if self._reports:
                self._report(outcome)

    def _report(self, outcome: SaveOutcome) -> None:
        if not outcome.ok:
            line = f"step {outcome.step} was not saved: {outcome.error}"
            for text in (line, *outcome.notes):
                print(f"hpcrun: {text}", file=sys.stderr, flush=True)
            if not outcome.fenced:
                failed = SaveFailed(attempt=self._attempt, step=outcome.step, reason=outcome.error)
                Journal(self._run).note(failed)
            return
        print(
            f"hpcrun: saved step {outcome.step} in {outcome.seconds:.2f} s, "
            f"training waited {outcome.stalled:.2f} s for it",
            flush=True,
        )
        for line in outcome.notes:
            print(f"hpcrun: {line}", file=sys.stderr, flush=True)
        # `seconds` is the time that training waited; goodput uses it.
        saved = Saved(
            attempt=self._attempt,
            step=outcome.step,
            seconds=round(outcome.stalled, 3),
            written_seconds=round(outcome.seconds, 3),
            bytes=outcome.bytes,
            host_memory=outcome.staged,
        )
        Journal(self._run).note(saved)


_FAILURES = (Cause.CRASH, Cause.HANG, Cause.NODE_FAILURE, Cause.PREEMPTION, Cause.TIME_LIMIT)
_PRIOR = 86400.0
"""Seconds: prior for the mean time between failures, one day."""


def build_engine(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    distributed: DistributedConfig,
    ranks: Ranks,
) -> CheckpointEngine:
    """Make the checkpoint engine of a run's attempt. Collective."""
    wanted = config.checkpoint
    store = CheckpointStore(run.checkpoints, attempt.owner, nonce=record.INCARNATION)
    limit = None if wanted.host_memory is None else int(wanted.host_memory * 1e9)
    on_host, pinned = distributed.num_gpus_per_node, bool(distributed.device_ids)
    staging = Staging(limit=limit, ranks_on_host=on_host, pinned=pinned)
    memory = None
    if wanted.memory_every != 0:
        memory = open_copies(str(run.path), ranks, staging, peers=bool(wanted.memory_copies))
    if memory is None and wanted.memory_every and distributed.rank == 0:
        line = "has no effect: no process of this job keeps memory for a restart"
        print(f"hpcrun: checkpoint.memory_every: {line}", flush=True)
    return CheckpointEngine(
        store,
        ranks,
        still_mine=lambda: require_ownership(run, attempt),
        after_commit=_pruning(store, config),
        staging=staging,
        memory=memory,
    )


def restore(
    run: RunDirectory, config: Config, trainer: DistributedAMPTrainer, engine: CheckpointEngine
) -> Restored | None:
    """Load the newest valid checkpoint into ``trainer``; return None if there is none yet. Collective.

    Raises:
        ReadFailure: a node failed to read a checkpoint. On all ranks.
        UserError: a checkpoint was committed but none is left, none can be loaded, or ``config`` trains
            something else. On all ranks.
    """
    restored = trainer.load_checkpoint(engine)
    if restored is None:
        trainer.control_ranks().from_rank_0(lambda: require_none_lost(run))
        return None
    loaded = restored
    # Before the removal of old checkpoints, which follows the config.
    changes = engine.ranks.together(lambda: _config_changes(run, config, loaded))
    if trainer.is_main_process:
        make_room(engine.store, config, restored.step)
    return replace(restored, notes=(*restored.notes, *changes))


def _config_changes(run: RunDirectory, config: Config, restored: Restored) -> list[str]:
    """Return a line on the changes of ``config`` since ``restored`` was saved, if there are any.

    Raises:
        NotTrainable: a resume may not change one of these keys.
    """
    # Earlier versions of hpcrun did not record the config.
    found = changes_since(restored.meta.get("config"), config, restored.step)
    if found is not None and found.refused:
        raise NotTrainable(found.refusal(run.config, restored.step))
    if found is None:
        return [f"step {restored.step} has no record of its config; a change since is not noticed"]
    since = f"the config has changed since step {restored.step} was saved"
    return [f"{since}: {'; '.join(found.allowed)}"] if found.allowed else []


def make_room(store: CheckpointStore, config: Config, step: int) -> None:
    """Quarantine damaged checkpoints and remove old ones after restoring ``step``; call it on rank 0.

    On a full disk no save would get far enough to do this.
    """
    prune = _pruning(store, config)
    for work in (partial(prune, step), partial(_quarantine, store)):
        try:
            work()
        except CheckpointError as error:
            print(f"hpcrun: {error}", file=sys.stderr, flush=True)


def _quarantine(store: CheckpointStore) -> None:
    for line in store.quarantine_damaged():
        print(f"hpcrun: {line}", flush=True)


def build_interval(
    run: RunDirectory,
    config: Config,
    ranks: Ranks,
    costs: Callable[[], tuple[float, float] | None],
    clock: Callable[[], float] = time.monotonic,
) -> SaveInterval:
    """Make the save interval: steps, minutes or Young's formula.

    ``costs``: (seconds that training waits, seconds until the commit) of the last save; None before the
    first.
    """
    wanted = config.checkpoint
    if wanted.auto:
        failure = failure_seconds(Journal(run).read(), time.time())
        return EverySeconds(lambda: young(costs(), failure), ranks, clock)
    if wanted.minutes is not None:
        seconds = 60.0 * wanted.minutes
        return EverySeconds(lambda: seconds, ranks, clock)
    return EverySteps(wanted.every)


def _pruning(store: CheckpointStore, config: Config) -> Callable[[int], None]:
    wanted = config.checkpoint
    return pruning(store, Retention(wanted.keep, wanted.keep_every, wanted.keep_best))


def failure_seconds(state: State, now: float) -> float:
    """Estimate the mean seconds of training between failures from the run's events.

    The prior counts as one failure in one day, so that a single early crash has limited weight.
    """
    trained, failures, since = 0.0, 0, None
    for event in state.of_kind(Started, Ended):
        if isinstance(event, Started):
            since = event.time
        else:
            trained += _passed(since, event.time)
            failures += event.cause in _FAILURES
            since = None
    trained += _passed(since, now)
    return (trained + _PRIOR) / (failures + 1)


def _passed(since: float | None, until: float) -> float:
    # A clock that was set back, or a lagging clock of another node, must not give negative time.
    return 0.0 if since is None else max(0.0, until - since)
