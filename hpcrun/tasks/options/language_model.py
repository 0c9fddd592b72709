"""Options of the language model."""

from typing import Annotated

from pydantic import AfterValidator, Field

from hpcrun.config.fields import BelowOne, Count, ShellText, Shrinking
from hpcrun.config.section import Section
from hpcrun.tasks.options.checks import from_here, splits_over_heads


class LanguageModelShape(Section):
    """The ``model`` section of the language model: a small GPT over bytes."""

    layers: Count = Field(default=4, description="Transformer blocks.")
    heads: Count = Field(
        default=4, description="Attention heads per block, which divide the width."
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
