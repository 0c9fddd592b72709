"""Options of the language model."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from hpcrun.config.engine import after, after_others
from hpcrun.config.fields import BelowOne, Count, ShellText, Shrinking
from hpcrun.config.section import Section, field
from hpcrun.tasks.options.checks import from_here, splits_over_heads


def _neurons_split(neurons: int | None, others: Mapping[str, Any]) -> int | None:
    if neurons is None:
        return None
    if others.get("kind") == "gpt":
        raise ValueError("is for model.kind=bdh; omit it, or write null")
    return splits_over_heads(neurons, others)


class LanguageModelShape(Section):
    """The ``model`` section of the language model: a small GPT, or BDH, over bytes."""

    kind: Literal["gpt", "bdh"] = field(
        default="gpt", description="Transformer, or the Dragon Hatchling (arXiv:2509.26507)."
    )
    layers: Count = field(
        default=4, description="Transformer blocks; bdh: passes through its only block."
    )
    heads: Count = field(
        default=4,
        description="Attention heads per block, which divide the width; bdh: the neurons.",
    )
    width: Annotated[Count, after_others(splits_over_heads)] = field(
        default=128, description="Length of the vector of one byte."
    )
    context: Count = field(
        default=128, description="Bytes in a sample, and in the context of the model."
    )
    dropout: BelowOne = field(
        default=0.0, description="Fraction of activations set to zero in training; 0: none."
    )
    neurons: Annotated[Count | None, after_others(_neurons_split)] = field(
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

    path: Annotated[ShellText | None, after(from_here)] = field(
        default=None,
        description="Corpus, packed there if absent; null: one in the user's cache folder.",
    )
    max_bytes: Count = field(
        default=8 * 1024 * 1024, description="Maximum bytes of source text to pack."
    )
    validation_fraction: Shrinking = field(
        default=0.05, description="Fraction of the files for validation."
    )


LANGUAGE_MODEL = (LanguageModelShape, LanguageModelData)
