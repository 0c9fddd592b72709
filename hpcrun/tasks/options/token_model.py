"""Options of the model of tokens."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from hpcrun.config.fields import BelowOne, Count, FromZero, Positive, ShellText
from hpcrun.tasks.options.checks import from_here, splits_over_heads


class TokenModelShape(BaseModel):
    """The ``model`` section of the model of tokens: a GPT."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    layers: Count = Field(default=4, description="Transformer blocks.")
    heads: Count = Field(
        default=4, description="Attention heads per block, which divide the width."
    )
    width: Count = Field(default=128, description="Length of the vector of one token.")
    context: Count = Field(default=128, description="Tokens in a sample, and in the context.")
    dropout: BelowOne = Field(
        default=0.0, description="Fraction of activations set to zero in training; 0: none."
    )
    vocabulary: Count | None = Field(
        default=None, description="Number of tokens; null: from the description of the shards."
    )

    @field_validator("width")
    @classmethod
    def _width_splits(cls, width: int, others: ValidationInfo) -> int:
        return splits_over_heads(width, others)


class TokenData(BaseModel):
    """The ``data`` keys of the model of tokens: its sources and their mixture."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    paths: list[ShellText] = Field(
        min_length=1,
        description="Folders of token shards, or flat .bin or .npy files: a source each.",
    )
    weights: list[Positive] | None = Field(
        default=None, description="Share of each source in the samples; null: by its size."
    )
    validation: list[ShellText] | None = Field(
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

    @field_validator("paths", "validation")
    @classmethod
    def _paths_from_here(cls, paths: list[str] | None) -> list[str] | None:
        return None if paths is None else [str(from_here(path)) for path in paths]

    @field_validator("weights")
    @classmethod
    def _one_for_each_path(
        cls, weights: list[float] | None, others: ValidationInfo
    ) -> list[float] | None:
        paths = others.data.get("paths", [])
        if weights is not None and len(weights) != len(paths):
            raise ValueError(
                f"has {len(weights)} numbers for {len(paths)} data.paths; give each one"
            )
        return weights


TOKEN_MODEL = (TokenModelShape, TokenData)
