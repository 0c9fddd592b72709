"""What a user may set of the built-in tasks, apart from the tasks so that checking needs no torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from hpcrun.config.fields import BelowOne, Count, ShellText, Shrinking


class LanguageModelShape(BaseModel):
    """The ``model`` section of the language model: a small GPT over bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    layers: Count = Field(default=4, description="Transformer blocks.")
    heads: Count = Field(default=4, description="Attention heads a block; they share the width.")
    width: Count = Field(default=128, description="Length of the vector that stands for one byte.")
    context: Count = Field(
        default=128, description="Bytes that a sample holds and that the model looks back on."
    )
    dropout: BelowOne = Field(
        default=0.0, description="Share of activations zeroed in training; 0: none."
    )

    @field_validator("width")
    @classmethod
    def _splits_over_heads(cls, width: int, others: ValidationInfo) -> int:
        # Rotary positions turn pairs, so that each head's share has to be even.
        unit = 2 * others.data.get("heads", 1)
        if width % unit:
            near = [size for size in (width // unit * unit, (width // unit + 1) * unit) if size]
            raise ValueError(
                f"should be a multiple of 2 * model.heads = {unit}, not {width}; "
                f"the nearest: {' or '.join(map(str, near))}"
            )
        return width


class LanguageModelData(BaseModel):
    """The task's keys of the ``data`` section: which bytes the model learns from.

    ``max_bytes`` and ``validation_fraction`` say how to pack; a corpus that is there already at
    ``path`` is used as it is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    path: ShellText | None = Field(
        default=None,
        description="HDF5 corpus, packed there if absent; null: one in the user's cache folder.",
    )
    max_bytes: Count = Field(
        default=8 * 1024 * 1024, description="Bytes of source text to pack, at most."
    )
    validation_fraction: Shrinking = Field(
        default=0.05, description="Share of the files kept apart to validate on."
    )

    @field_validator("path")
    @classmethod
    def _from_here(cls, path: str | None) -> str | None:
        if path is None:
            return None
        if not path:
            raise ValueError("is empty; leave the key out, or write null")
        # The job may start in another folder, so a relative path is settled where it was written.
        return str(Path(path).expanduser().absolute())


LANGUAGE_MODEL = (LanguageModelShape, LanguageModelData)
