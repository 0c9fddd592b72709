"""The other loaders of a user's loop: those that a checkpoint has no position of."""

import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hpcrun.errors import UserError
from hpcrun.train.data.exact_loader import ExactLoader
from hpcrun.train.data.positioned import LedStream
from hpcrun.train.data.readers import BatchReader


def require_own_generators() -> None:
    """Raise UserError for a loader, such as that of a validation, that draws only in its first pass.

    The seed of its workers comes from the generator of the training, once in each start.
    """
    # Also the loaders of an earlier training in this process.
    known = {id(vars(exact).get("loader")) for exact in _alive(ExactLoader)}
    for loader in _alive(DataLoader):
        if loader.persistent_workers and loader.generator is None and id(loader) not in known:
            raise UserError(
                f"DataLoader of a {type(loader.dataset).__name__} with persistent_workers=True: its first "
                "pass of each start draws a random number, which changes the training after a resume; give "
                "it generator=torch.Generator(), or if the training iterates it, pass it in loader="
            )


class UnknownLoaders:
    """Search, in the first two steps of a start, for loaders that a checkpoint has no position of."""

    def __init__(self) -> None:
        self._before: WeakKeyDictionary[Any, int] | None = None
        self._done = False

    def step(self) -> None:
        """Note the batches of all loaders so far, or in the second step compare; later do nothing.

        Raises:
            UserError: a loader has given batches between the two steps, in a pass that began before.
        """
        if self._done:
            return
        if self._before is None:
            ours = (BatchReader, LedStream)
            running = _alive(_BaseDataLoaderIter)
            self._before = WeakKeyDictionary(
                {one: one._num_yielded for one in running if not isinstance(one._dataset, ours)}
            )
            return
        self._done = True
        for one, count in self._before.items():
            if one._num_yielded > count:
                raise UserError(
                    f"state.step(): the loop iterates a DataLoader of a {type(one._dataset).__name__} that "
                    "hpcrun.resumable() was not given, so a resume would repeat samples; pass it in loader=, "
                    "and iterate state.batches(loader)"
                )


def _alive(kind: type) -> Iterator[Any]:
    # isinstance() would read the attribute __class__ of any object of the program.
    return (one for one in gc.get_objects() if issubclass(type(one), kind))
