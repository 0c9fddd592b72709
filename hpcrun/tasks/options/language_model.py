"""Options of the language model."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from hpcrun.config.fields import BelowOne, Count, ShellText, Shrinking
from hpcrun.config.section import Section
from hpcrun.tasks.options.checks import from_here, splits_over_heads


def _neurons_split(neurons: int | None, others: ValidationInfo) -> int | None:
    if neurons is None:
        return None
    if others.data.get("kind") == "gpt":
        raise ValueError("is for model.kind=bdh; omit it, or write null")
    return splits_over_heads(neurons, others)


class LanguageModelShape(Section):
    """The ``model`` section of the language model: a small GPT, or BDH, over bytes."""

    kind: Literal["gpt", "bdh"] = Field(
        default="gpt", description="Transformer, or the Dragon Hatchling (arXiv:2509.26507)."
    )
    layers: Count = Field(
        default=4, description="Transformer blocks; bdh: passes through its only block."
    )
    heads: Count = Field(
        default=4,
        description="Attention heads per block, which divide the width; bdh: the neurons.",
    )
    width: Annotated[Count, AfterValidator(splits_over_heads)] = Field(
        default=128, description="Length of the vector of one byte."
    )
    context: Count = Field(
        default=128, description="Bytes in a sample, and in the context of the model."
    )
    dropout: BelowOne = Field(
        default=0.0, description="Fraction of activations set to zero in training; 0: none."
    )
    neurons: Annotated[Count | None, AfterValidator(_neurons_split)] = Field(
        default=None, description="bdh: neurons per layer; null: 32 times the width."
    )

    @property
    def neurons_or_default(self) -> int:
        """Number of neurons of a BDH layer."""
        return self.neurons or 32 * self.width


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


LANGUAGE_MODEL = (LanguageModelShape, LanguageModelData)
