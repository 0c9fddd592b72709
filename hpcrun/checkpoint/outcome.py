"""Results of a save and of a restore."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SaveOutcome:
    """Result of a save. All ranks get the same values, except for the times and ``staged``.

    Attributes:
        error: the reason of a failure, with the rank.
        seconds: time from the call to the commit.
        bytes: size of all files.
        fenced: True if a newer attempt owns the run, so that this attempt must stop.
        notes: other problems, as text.
        stalled: seconds that training waited for this save.
        staged: host memory held, in bytes.
        in_memory: True for a snapshot that was kept in memory only, and is no commit.
    """

    ok: bool
    step: int
    path: Path | None = None
    error: str | None = None
    seconds: float = 0.0
    bytes: int = 0
    fenced: bool = False
    notes: tuple[str, ...] = ()
    stalled: float = 0.0
    staged: int = 0
    in_memory: bool = False


@dataclass(frozen=True)
class Restored:
    """Result of a restore: the shared state, the state of this rank, and notes for the user.

    Attributes:
        own: the state of this rank; None if the number of ranks has changed.
        notes: every damaged file that was found; the same on all ranks.
        committed: the newest step on disk; None if there is none.
        snapshot: time in unix seconds of a state from the memory of the nodes; None: a state from disk.
    """

    step: int
    shared: dict[str, Any]
    own: dict[str, Any] | None
    meta: dict[str, Any]
    notes: tuple[str, ...]
    committed: int | None
    snapshot: float | None = None
