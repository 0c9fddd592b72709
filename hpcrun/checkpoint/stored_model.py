"""The model in a committed checkpoint: its tensors by canonical name, read in groups."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hpcrun.checkpoint.sharded.rank_file import StoreReader
from hpcrun.checkpoint.sharded.restore import SHARED
from hpcrun.checkpoint.state.tree import join, name_of
from hpcrun.printing import Progress
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.index import TensorEntry
from hpcrun.storage.store import CheckpointStore

_MODEL, _AVERAGES = "model/", "ema/"


class StoredModel:
    """The model of ``step``. Every byte that a method returns is verified.

    Attributes:
        entries: type, shape and pieces of each tensor of the state dict by its name.
        others: the values of the state dict that are not tensors (``get_extra_state``).

    Args:
        averaged: replace the weights by their averages (``train.ema``).

    Raises:
        DamagedCheckpoint: a file is damaged; the text names it. The methods raise it too.
        CheckpointError: the checkpoint holds no model, or no averages of its weights.
    """

    def __init__(self, store: CheckpointStore, step: int, *, averaged: bool = False) -> None:
        self._reader = StoreReader(store, step)
        skeleton = self._reader.blob(SHARED).get("model")
        if not skeleton:
            raise CheckpointError(f"{store.path(step)}: contains no model")
        stored = self._reader.index.tensors
        averages = {name.removeprefix(_AVERAGES) for name in stored if name.startswith(_AVERAGES)}
        if averaged and not averages:
            raise CheckpointError(f"{store.path(step)}: contains no averages; train with train.ema")

        def source(name: str) -> str:
            # Tensors without an average (buffers, frozen weights) come from the model.
            key = name.removeprefix(_MODEL)
            return _AVERAGES + key if averaged and key in averages else name

        found = {key: name_of(value) for key, value in skeleton.items()}
        self._stored = {key: source(name) for key, name in found.items() if name is not None}
        self.entries: dict[str, TensorEntry] = {
            key: stored[name] for key, name in self._stored.items()
        }
        rest = {key: value for key, value in skeleton.items() if found[key] is None}
        inside = [name for name in _names(rest) if name in stored]
        self.others: dict[str, Any] = join(rest, self._loaded(inside)) if rest else {}
        self._order = list(found)

    def tensors(
        self, names: Iterable[str], progress: Progress = lambda *_: None
    ) -> dict[str, torch.Tensor]:
        """Return the whole tensors ``names`` on the CPU.

        Args:
            progress: called with the bytes that were read, and the bytes of the tensors.
        """
        wanted = {name: self._stored[name] for name in names}
        loaded = self._loaded(wanted.values(), progress)
        return {name: loaded[stored] for name, stored in wanted.items()}

    def state(self, progress: Progress = lambda *_: None) -> dict[str, Any]:
        """Return the complete state dict, with whole tensors on the CPU; ``progress``: as of `tensors`."""
        found = {**self.tensors(self.entries, progress), **self.others}
        return {name: found[name] for name in self._order}

    def _loaded(
        self, names: Iterable[str], progress: Progress = lambda *_: None
    ) -> dict[str, torch.Tensor]:
        into = {name: self._reader.empty(name) for name in names}
        self._reader.load(into, progress)
        return into


def _names(skeleton: Any) -> Iterator[str]:
    """Yield the names of the tensors in ``skeleton``."""
    name = name_of(skeleton)
    if name is not None:
        yield name
    elif isinstance(skeleton, dict | list | tuple):
        for child in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from _names(child)
