"""The weights of the best validation, put back for the report on a training that ends with others."""

import sys
from dataclasses import dataclass

from hpcrun.checkpoint.sharded.collective import Together
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.train.evaluation.early_stopping import EarlyStopping
from hpcrun.train.step.trainer import AMPTrainer


@dataclass(frozen=True)
class Weights:
    """The weights after ``step`` steps, by the loss of their validation, if there was one."""

    step: int
    validation_loss: float | None


def put_best_back(
    trainer: AMPTrainer,
    engine: CheckpointEngine,
    store: CheckpointStore,
    early: EarlyStopping,
    last: Weights,
    together: Together,
) -> Weights:
    """Load the best checkpoint that is kept, and say what the trainer holds then. Collective.

    The trainer has ``last``, which is committed: nothing of it is lost, and nothing may be saved after
    this. It stays where the best is not kept, or is the last itself.

    Raises:
        CheckpointError: neither the best nor the last can be read any more.
    """
    kept = together.from_rank_0(lambda: _kept(store, early))
    best = early.best_step if early.best_step in kept else max(kept, default=last.step)
    if early.best is None or best == last.step or last.step in kept:
        return last
    others = together.from_rank_0(lambda: set(store.steps()) - {best})
    try:
        if trainer.load_checkpoint(engine, skip=others) is not None:
            return Weights(best, early.best)
        trouble = f"step {best} is gone"
    except CheckpointError as error:
        trouble = str(error)
    if trainer.is_main_process:
        line = f"the report is of step {last.step}, and not of the best: {trouble}"
        print(f"hpcrun: {line}", file=sys.stderr, flush=True)
    # What was read until then may have overwritten the weights.
    if (
        trainer.load_checkpoint(engine, skip=together.from_rank_0(lambda: _before(store, last)))
        is None
    ):
        raise CheckpointError(f"step {last.step} is gone")
    return last


def _kept(store: CheckpointStore, early: EarlyStopping) -> list[int]:
    """The checkpoints with the lowest validation loss: equal ones are equally good."""
    return [
        step
        for step, manifest in store.valid().items()
        if early.best is not None and manifest.meta.get("validation_loss") == early.best
    ]


def _before(store: CheckpointStore, last: Weights) -> set[int]:
    return set(store.steps()) - {last.step}
