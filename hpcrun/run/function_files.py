"""Files of a function that Python submits, in a run directory or in a sweep folder."""

from pathlib import Path

FOLDER = ".calls"


def outcome_file(run: Path, rank: int) -> Path:
    """Return the file with the value, or the exception, of ``rank``."""
    return run / FOLDER / f"rank-{rank:05d}.pkl"
