"""Restore the best validated weights for the report, if training ends with different weights."""

import sys
from dataclasses import dataclass

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.train.evaluation.early_stopping import EarlyStopping
from hpcrun.train.step.trainer import AMPTrainer


@dataclass(frozen=True)
class Weights:
    """The weights after ``step`` steps, and their validation loss; None without a validation."""

    step: int
    validation_loss: float | None


def put_best_back(
    trainer: AMPTrainer,
    engine: CheckpointEngine,
    store: CheckpointStore,
    early: EarlyStopping,
    last: Weights,
) -> Weights:
    """Load the best checkpoint that exists, and return which weights the trainer has then. Collective.

    The trainer enters with ``last``, which is committed, so nothing is lost; save nothing after this call.
    The trainer keeps ``last`` if the best checkpoint is gone, or if ``last`` is the best.

    Raises:
        CheckpointError: neither the best nor the last checkpoint is readable.
    """
    ranks = engine.ranks
    kept = ranks.from_rank_0(lambda: _kept(store, early))
    best = early.best_step if early.best_step in kept else max(kept, default=last.step)
    if early.best is None or best == last.step or last.step in kept:
        return last
    others = ranks.from_rank_0(lambda: set(store.steps()) - {best})
    try:
        if trainer.load_checkpoint(engine, skip=others) is not None:
            return Weights(best, early.best)
        problem = f"step {best} is gone"
    except CheckpointError as error:
        problem = str(error)
    if trainer.is_main_process:
        line = f"the report is for step {last.step} instead of the best: {problem}"
        print(f"hpcrun: {line}", file=sys.stderr, flush=True)
    # The failed load may have overwritten some weights.
    skip = ranks.from_rank_0(lambda: _before(store, last))
    if trainer.load_checkpoint(engine, skip=skip) is None:
        raise CheckpointError(f"step {last.step} is gone")
    return last


def _kept(store: CheckpointStore, early: EarlyStopping) -> list[int]:
    """Return the steps of all checkpoints with the lowest validation loss; ties are equally good."""
    return [
        step
        for step, manifest in store.valid().items()
        if early.best is not None and manifest.meta.get("validation_loss") == early.best
    ]


def _before(store: CheckpointStore, last: Weights) -> set[int]:
    return set(store.steps()) - {last.step}
