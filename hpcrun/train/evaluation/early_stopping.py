"""The best validation loss so far, and when to wait for a better one no longer."""

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class EarlyStopping:
    """Decides from losses that all ranks have in common, so that all decide alike.

    ``best`` is the lowest loss and ``best_step`` its step. A loss counts as better for ``patience`` only
    if it is ``min_delta`` below the last that did: ``reference``; ``waited`` counts those since that do not.
    ``seen`` and ``loss`` are the last validation's step and loss. All of it is in the checkpoint.
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
        """Whether training ends after the step of the last validation."""
        return self.patience is not None and self.waited >= self.patience

    def end(self, steps: int) -> int:
        """The step that training ends after: the last of ``steps``, or the one it is stopped at."""
        return self.seen if self.due and self.seen is not None else steps

    def saw(self, step: int, loss: float | None) -> bool:
        """Take note of a validation after ``step`` steps; whether it is the best so far."""
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

    def told(self) -> str:
        """Why training ends, once it is due."""
        wanted, best = "a better loss", ""
        if self.min_delta and self.reference is not None:
            # Not below the best one, which may have come since.
            wanted = f"a loss {self.min_delta:g} (train.min_delta) below {self.reference:.6g}"
        if self.best is not None:
            best = f"; the best was {self.best:.6g}, at step {self.best_step}"
        validations = "1 validation" if self.waited == 1 else f"{self.waited} validations"
        return f"at step {self.seen}: {validations} without {wanted}{best}"

    def state_dict(self) -> dict[str, Any]:
        """What was seen, as plain data; not what was asked for."""
        return {key: value for key, value in asdict(self).items() if key not in _ASKED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what :meth:`state_dict` gave."""
        for key in self.state_dict():
            setattr(self, key, state[key])


_ASKED = ("patience", "min_delta")
