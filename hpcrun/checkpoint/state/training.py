"""The state of a training in a checkpoint: its parts, and the order of capture and restore.

:class:`hpcrun.Checkpointer` and the trainers save and restore through :class:`TrainingState`, so that the
checkpoints of both have the same content.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.sharded.restore import Template
from hpcrun.checkpoint.state import capture
from hpcrun.checkpoint.state.compatibility import apply_buffers, capture_buffers
from hpcrun.checkpoint.state.generators import capture_generators, restore_generators
from hpcrun.checkpoint.state.tree import fill, shards
from hpcrun.storage.index import TensorEntry


class Averages(Protocol):
    """Averages of the weights; names are canonical parameter names."""

    def tensors(self) -> dict[str, Tensor]:
        """Return references to the averages."""
        ...

    def restart(self, names: Collection[str]) -> None:
        """Set these averages to the current weights."""
        ...


class RankPart(NamedTuple):
    """A part of the state that each rank has for itself.

    Attributes:
        capture: returns plain data and small tensors; None if there is nothing to save.
        restore: restores such a result, and returns a note for the user or None. The argument is None if the
            checkpoint lacks this part, or was saved by another number of ranks.
    """

    capture: Callable[[], Any]
    restore: Callable[[Any], str | None]


@dataclass(frozen=True)
class TrainingState:
    """The parts of a training that a checkpoint holds.

    Attributes:
        model: a plain module, in DDP, compiled, or sharded by ``fully_shard``.
        optimizer: made after the model was sharded.
        scaler: an object with ``state_dict()`` and ``load_state_dict()``, or None.
        scheduler: as ``scaler``.
        averages: averages of the weights, or None.
        buffers_differ: True if the ranks keep different buffers between steps.
        rank_parts: further parts of each rank, by their key in the rank's data.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: Any = None
    scheduler: Any = None
    averages: Averages | None = None
    buffers_differ: bool = False
    rank_parts: Mapping[str, RankPart] = field(default_factory=dict)

    def capture(self, extra: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return references to the state of all ranks, with ``extra``, and to the state of this rank.

        Args:
            extra: tensors and plain data of the user.

        Raises:
            CheckpointError: a value cannot be saved, or could not be restored; the text says where.
        """
        shared = self.capture_shared(extra)
        own = capture_generators()
        if self.buffers_differ:
            own["buffers"] = capture_buffers(self.model)
        kept = {key: part.capture() for key, part in self.rank_parts.items()}
        return shared, own | {key: value for key, value in kept.items() if value is not None}

    def capture_shared(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Return the part of :meth:`capture` that all ranks share; raises as :meth:`capture`."""
        shared = capture.capture_shared(
            self.model, self.optimizer, scaler=self.scaler, scheduler=self.scheduler, extra=extra
        )
        return shared if self.averages is None else {**shared, "ema": self.averages.tensors()}

    def alike(self) -> Callable[[str], bool]:
        """Return a function: True for names of tensors that are the same on all data-parallel ranks."""
        return capture.alike(self.model)

    def template(self, extra: dict[str, Any] | None = None) -> Template:
        """Return the function that gives the tensors to load into.

        Args:
            extra: the live data of the user; its sharded tensors load in place.
        """
        base = capture.template(self.model, self.optimizer)

        def tensors(entries: Mapping[str, TensorEntry], skeleton: Any) -> dict[str, Any]:
            found = base(entries, skeleton)
            if self.averages is not None and any(name.startswith("ema/") for name in entries):
                found["ema"] = self.averages.tensors()
            sharded = shards(extra or {})
            return found | ({"extra": sharded} if sharded else {})

        return tensors

    def restore(self, restored: Restored, extra: dict[str, Any] | None = None) -> Restored:
        """Restore a checkpoint that was loaded with :meth:`template`, and return it with all notes.

        The random generators come after the shared state and ``extra``: a ``load_state_dict()`` may draw
        random numbers.

        Args:
            extra: the live data of the user, filled in place; None: only returned.

        Raises:
            CheckpointError: the state does not fit; the text names a difference.
        """
        parts = {"scaler": self.scaler, "scheduler": self.scheduler}
        saved = capture.apply_shared(restored.shared, self.model, self.optimizer, **parts)
        notes = [*restored.notes, *capture.left_out(restored.shared, **parts)]
        notes += self._restart_averages(restored.shared.get("ema", {}))
        if extra is not None:
            fill(extra, saved, notes)
        own = restored.own
        if own is not None:
            # A checkpoint of another parallelism may hold buffers that are identical on all ranks.
            if self.buffers_differ and "buffers" in own:
                apply_buffers(own["buffers"], self.model)
            notes += restore_generators(own)
        for key, part in self.rank_parts.items():
            note = part.restore(None if own is None else own.get(key))
            notes += [] if note is None else [note]
        return replace(restored, notes=tuple(notes))

    def _restart_averages(self, saved: Collection[str]) -> list[str]:
        """Start averages that the checkpoint lacks from the current weights; return notes about them."""
        lacking = set() if self.averages is None else self.averages.tensors().keys() - set(saved)
        if self.averages is None or not lacking:
            return []
        self.averages.restart(lacking)
        name = min(lacking) if saved else "the weights"
        return [
            f"the checkpoint has no average of {name}; the average starts from the loaded weights"
        ]
