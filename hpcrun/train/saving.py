"""The checkpoints of a run: their engine, interval and content, the reports of saves, and the restore."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hpcrun.checkpoint.interval import EverySeconds, EverySteps, SaveInterval, young
from hpcrun.checkpoint.memory.copies import open_copies
from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.saver import SaveContent
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
from hpcrun.run.record import require_ownership
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.lost import require_none_lost
from hpcrun.storage.retention import Retention, pruning
from hpcrun.storage.store import CheckpointStore
from hpcrun.train.data.batches import Steps
from hpcrun.train.metrics.log import MetricsLog
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.validation import EarlyStopping


def content_of(
    batches: Steps, early: EarlyStopping, metrics: MetricsLog, meta: dict[str, Any]
) -> Callable[[int], SaveContent]:
    """Return a function: what a checkpoint after a number of steps holds in addition to the trainer's state.

    Args:
        batches: provide the position in the data.
        early: the checkpoint holds the validation loss of its step, if ``early`` has one.
        metrics: the checkpoint holds their unlogged part.
        meta: what every manifest holds.
    """

    def content(done: int) -> SaveContent:
        at = {"step": done, "samples": batches.batching.span(done).start}
        validation = {"validation_loss": early.loss} if early.seen == done else {}
        stream = batches.saved(done)
        extra = at | {"early_stopping": early.state_dict(), "metrics": metrics.saved()}
        return SaveContent(
            extra | ({"stream": stream.shared} if stream.shared else {}),
            meta | at | validation,
            {"stream": stream.own} if stream.own else {},
        )

    return content


class SaveReports:
    """Prints the outcome of each save, and writes it to the journal."""

    def __init__(self, run: RunDirectory, attempt: Attempt) -> None:
        self._run, self._attempt = run, attempt

    def __call__(self, outcome: SaveOutcome, _: bool) -> None:
        """Report an outcome; call it on rank 0."""
        if outcome.in_memory:
            if outcome.error and not outcome.fenced:
                print(f"hpcrun: {outcome.error}", file=sys.stderr, flush=True)
            return
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
