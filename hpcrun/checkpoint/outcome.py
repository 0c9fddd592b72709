"""What a save or a restore tells its caller."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on all ranks but for the times and ``staged``, which are this one's.

    ``error`` says why it failed, naming the rank; ``fenced`` that a newer incarnation owns the run, so
    that this one must stop. ``bytes`` counts all files; ``notes`` tells what else went wrong.
    ``seconds`` is from the call to the commit, ``stalled`` how much of it training waited, ``waited`` how
    much of that for the save before; ``staged`` is the host memory held, in bytes.
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
    waited: float = 0.0
    staged: int = 0


@dataclass(frozen=True)
class Restored:
    """What a restore found: the shared state, this rank's own, and what to tell the user.

    ``own`` is None where the number of ranks has changed. ``notes`` names every damaged file on
    the way, the same on all ranks.
    """

    step: int
    shared: dict[str, Any]
    own: dict[str, Any] | None
    meta: dict[str, Any]
    notes: tuple[str, ...]
