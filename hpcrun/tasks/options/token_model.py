"""Options of the model of tokens."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from hpcrun.config.fields import BelowOne, Count, FromZero, Positive, ShellText
from hpcrun.config.section import Section
from hpcrun.tasks.options.checks import from_here, splits_over_heads


def _from_here(paths: list[str] | None) -> list[str] | None:
    return None if paths is None else [str(from_here(path)) for path in paths]


def _one_for_each_path(weights: list[float] | None, others: ValidationInfo) -> list[float] | None:
    paths = others.data.get("paths", [])
    if weights is not None and len(weights) != len(paths):
        raise ValueError(f"has {len(weights)} numbers for {len(paths)} data.paths; give each one")
    return weights


class TokenModelShape(Section):
    """The ``model`` section of the model of tokens: a GPT."""

    layers: Count = Field(default=4, description="Transformer blocks.")
    heads: Count = Field(
        default=4, description="Attention heads per block, which divide the width."
    )
    width: Annotated[Count, AfterValidator(splits_over_heads)] = Field(
        default=128, description="Length of the vector of one token."
    )
    context: Count = Field(default=128, description="Tokens in a sample, and in the context.")
    dropout: BelowOne = Field(
        default=0.0, description="Fraction of activations set to zero in training; 0: none."
    )
    vocabulary: Count | None = Field(
        default=None, description="Number of tokens; null: from the description of the shards."
    )


class TokenData(Section):
    """The ``data`` keys of the model of tokens: its sources and their mixture."""

    paths: Annotated[list[ShellText], Field(min_length=1), AfterValidator(_from_here)] = Field(
        description="Folders of token shards, or flat .bin or .npy files: a source each.",
    )
    weights: Annotated[list[Positive] | None, AfterValidator(_one_for_each_path)] = Field(
        default=None, description="Share of each source in the samples; null: by its size."
    )
    validation: Annotated[list[ShellText] | None, AfterValidator(_from_here)] = Field(
        default=None,
        description="Folders or files to validate on; null: the validation shards of paths.",
    )
    dtype: Literal["uint16", "uint32"] = Field(
        default="uint16", description="Type of the tokens in a flat .bin file."
    )
    boundaries: Literal["cross", "loss", "attention"] = Field(
        default="cross",
        description="Ends of documents in a sample: ignored, masked in the loss, or also in attention.",
    )
    end_token: FromZero | None = Field(
        default=None, description="Last token of each document in flat files; null: unknown."
    )
    verify: bool = Field(
        default=False, description="Check the hashes of all shards before training."
    )


TOKEN_MODEL = (TokenModelShape, TokenData)
