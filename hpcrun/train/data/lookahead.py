"""An iterator over batches that can look one batch ahead."""

from collections.abc import Iterator
from typing import Any

END = object()
"""Returned in place of a batch at the end of a pass."""


class Lookahead:
    """Iterator that can look one batch ahead.

    Attributes:
        ahead: the batch that was read and not handed out, if any.
        looked: a look has found the next batch, or the end, since the last batch.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self.ahead: list[Any] = []
        self.looked = False

    def __iter__(self) -> "Lookahead":
        return self

    def __next__(self) -> Any:
        self.looked = False
        return self.ahead.pop() if self.ahead else next(self._batches)

    def has_more(self) -> bool:
        """Return True if there is another batch, and keep it."""
        if not self.ahead:
            self.ahead = [one for one in [next(self._batches, END)] if one is not END]
        self.looked = True
        return bool(self.ahead)
