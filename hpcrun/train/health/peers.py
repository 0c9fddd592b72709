"""The other ranks of an attempt, through the key-value store that all ranks share."""

import contextlib
import time
from typing import Protocol

from hpcrun.train.health.limits import StallLimits


class Store(Protocol):
    """The methods used of torch's key-value stores; each may raise RuntimeError if the store is gone."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...


class Peers:
    """The notes and numbers that the ranks share; without a store, this rank is alone.

    A store that fails is not asked again: after a late answer, later answers belong to other questions.
    """

    def __init__(self, store: Store | None) -> None:
        """Use ``store``, this rank's own connection to the shared store; None: this rank is alone."""
        self._store, self._lost = store, False

    @property
    def reachable(self) -> bool:
        """True while the store answers."""
        return self._store is not None

    def awaited(self) -> bool:
        """Return True if some rank does work for which the other ranks wait in a step.

        A rank that has lost the store does not know what its peers do, so it assumes such work.
        """
        return bool(self.count("awaited", 0)) or self._lost

    def count(self, key: str, more: int) -> int | None:
        """Add to a number that the ranks share, and return it; None without a store."""
        if self._store is None:
            return None
        try:
            return self._store.add(key, more)
        except RuntimeError:
            self._lose_store()
            return None

    def write(self, key: str, value: str) -> None:
        """Write a note for the other ranks, if the store answers."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(key, value)

    def read(self, key: str) -> str | None:
        """Return a note; None if no rank has written it, or without a store."""
        return self._store.get(key).decode() if self._store and self.wrote(key) else None

    def wrote(self, *keys: str) -> bool:
        """Return True if all notes ``keys`` are written."""
        if self._store is None:
            return False
        try:
            return self._store.check(list(keys))
        except RuntimeError:
            self._lose_store()
            return False

    def wait_for(self, keys: list[str], seconds: float, pause: float) -> None:
        """Wait until all notes ``keys`` are written, at most ``seconds``; look every ``pause`` seconds."""
        until = time.monotonic() + seconds
        while self.reachable and time.monotonic() < until and not self.wrote(*keys):
            time.sleep(pause)

    def _lose_store(self) -> None:
        self._store, self._lost = None, True


class PeerFailure:
    """The failure of a peer, and how long this rank has outlived the peer."""

    def __init__(self, peers: Peers, limits: StallLimits) -> None:
        self._peers, self._limits = peers, limits
        self._since: float | None = None

    def outlived(self, doing: str, now: float) -> bool:
        """Return True if this rank, in the work ``doing``, must not wait longer for a failed peer.

        ``now``: seconds of a monotonic clock. The time counts from the call that first sees the failure.
        """
        if self._since is None:
            self._since = now if self._peers.wrote("failed") else None
            return False
        return now - self._since >= self._limits.survive(doing)
