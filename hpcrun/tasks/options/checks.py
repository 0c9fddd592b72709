"""Checks that the options of several tasks share."""

from pathlib import Path

from pydantic import ValidationInfo


def splits_over_heads(size: int, others: ValidationInfo) -> int:
    """Return ``size`` if it suits the heads among the ``others``; else raise ValueError with near sizes."""
    # Rotary positions rotate pairs, so each head needs an even length.
    unit = 2 * others.data.get("heads", 1)
    if size % unit:
        near = [fits for fits in (size // unit * unit, (size // unit + 1) * unit) if fits]
        raise ValueError(
            f"should be a multiple of 2 * model.heads = {unit}, not {size}; "
            f"the nearest: {' or '.join(map(str, near))}"
        )
    return size


def from_here(path: str | None) -> str | None:
    """Return the absolute form of ``path``; None stays None.

    Raises:
        ValueError: ``path`` is empty.
    """
    if path is None:
        return None
    if not path:
        raise ValueError("is empty; omit the key, or write null")
    # The job may start in another folder, so relative paths become absolute here.
    return str(Path(path).expanduser().absolute())
