"""Track the best validation loss, and decide when to stop early."""

import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.train.step.trainer import AMPTrainer


@dataclass
class EarlyStopping:
    """Early stopping on losses that are identical on all ranks, so all ranks decide the same.

    ``best`` is the lowest loss and ``best_step`` its step. For ``patience``, a loss counts as better only
    if it is ``min_delta`` below ``reference``, the last loss that counted as better; ``waited`` counts the
    validations since. ``seen`` and ``loss`` are the last validation's step and loss. A checkpoint holds all
    of these.
    """

    patience: int | None = None
    min_delta: float = 0.0
    best: float | None = None
    best_step: int | None = None
    reference: float | None = None
    waited: int = 0
    seen: int | None = None
    loss: float | None = None

    @property
    def due(self) -> bool:
        """True if training ends after the step of the last validation."""
        return self.patience is not None and self.waited >= self.patience

    def end(self, steps: int) -> int:
        """Return the step after which training ends: ``steps``, or the step of an early stop."""
        return self.seen if self.due and self.seen is not None else steps

    def record(self, step: int, loss: float | None) -> bool:
        """Record the loss of a validation after ``step`` steps; return True if it is the best so far."""
        if loss is None:
            return False
        self.seen, self.loss = step, loss
        finite = math.isfinite(loss)
        if finite and (self.reference is None or loss < self.reference - self.min_delta):
            self.reference, self.waited = loss, 0
        else:
            self.waited += 1
        if not finite or (self.best is not None and loss >= self.best):
            return False
        self.best, self.best_step = loss, step
        return True

    def reason(self) -> str:
        """Return the reason for the end of training, once it is due."""
        wanted, best = "a better loss", ""
        if self.min_delta and self.reference is not None:
            # Not below ``best``: a later, slightly lower loss may be the best.
            wanted = f"a loss {self.min_delta:g} (train.min_delta) below {self.reference:.6g}"
        if self.best is not None:
            best = f"; the best was {self.best:.6g}, at step {self.best_step}"
        validations = "1 validation" if self.waited == 1 else f"{self.waited} validations"
        return f"at step {self.seen}: {validations} without {wanted}{best}"

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded values as plain data, without the options."""
        return {key: value for key, value in asdict(self).items() if key not in _OPTIONS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for key in self.state_dict():
            setattr(self, key, state[key])


_OPTIONS = ("patience", "min_delta")


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
