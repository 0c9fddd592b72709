"""Options of the built-in tasks, separate from the tasks so that checking them needs no torch."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo

from hpcrun.config.fields import BelowOne, Count, Section, ShellText, Shrinking


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


class LanguageModelShape(Section):
    """The ``model`` section of the language model: a small GPT over bytes."""

    layers: Count = Field(default=4, description="Transformer blocks.")
    heads: Count = Field(
        default=4, description="Attention heads per block, which divide the width."
    )
    width: Annotated[Count, AfterValidator(splits_over_heads)] = Field(
        default=128, description="Length of the vector of one byte or token."
    )
    context: Count = Field(
        default=128, description="Bytes or tokens in a sample, and in the context."
    )
    dropout: BelowOne = Field(
        default=0.0, description="Fraction of activations set to zero in training; 0: none."
    )


class LanguageModelData(Section):
    """The task's keys of the ``data`` section: the bytes to train on.

    ``max_bytes`` and ``validation_fraction`` control the packing; an existing corpus at ``path`` is used
    unchanged.
    """

    path: Annotated[ShellText | None, AfterValidator(from_here)] = Field(
        default=None,
        description="Corpus, packed there if absent; null: one in the user's cache folder.",
    )
    max_bytes: Count = Field(
        default=8 * 1024 * 1024, description="Maximum bytes of source text to pack."
    )
    validation_fraction: Shrinking = Field(
        default=0.05, description="Fraction of the files for validation."
    )
