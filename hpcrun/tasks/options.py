"""Options of the built-in tasks, separate from the tasks so that checking them needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from hpcrun.config.fields import BelowOne, Count, FromZero, Positive, ShellText, Shrinking


class LanguageModelShape(BaseModel):
    """The ``model`` section of the language model: a small GPT, or BDH, over bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

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
    width: Count = Field(default=128, description="Length of the vector of one byte.")
    context: Count = Field(
        default=128, description="Bytes in a sample, and in the context of the model."
    )
    dropout: BelowOne = Field(
        default=0.0, description="Fraction of activations set to zero in training; 0: none."
    )
    neurons: Count | None = Field(
        default=None, description="bdh: neurons per layer; null: 32 times the width."
    )

    @field_validator("width")
    @classmethod
    def _width_splits(cls, width: int, others: ValidationInfo) -> int:
        return _splits_over_heads(width, others)

    @field_validator("neurons")
    @classmethod
    def _neurons_split(cls, neurons: int | None, others: ValidationInfo) -> int | None:
        if neurons is None:
            return None
        if others.data.get("kind") == "gpt":
            raise ValueError("is for model.kind=bdh; omit it, or write null")
        return _splits_over_heads(neurons, others)

    @property
    def neurons_or_default(self) -> int:
        """Number of neurons of a BDH layer."""
        return self.neurons or 32 * self.width


def _splits_over_heads(size: int, others: ValidationInfo) -> int:
    # Rotary positions rotate pairs, so each head needs an even length.
    unit = 2 * others.data.get("heads", 1)
    if size % unit:
        near = [fits for fits in (size // unit * unit, (size // unit + 1) * unit) if fits]
        raise ValueError(
            f"should be a multiple of 2 * model.heads = {unit}, not {size}; "
            f"the nearest: {' or '.join(map(str, near))}"
        )
    return size


class LanguageModelData(BaseModel):
    """The task's keys of the ``data`` section: the bytes to train on.

    ``max_bytes`` and ``validation_fraction`` control the packing; an existing corpus at ``path`` is used
    unchanged.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    path: ShellText | None = Field(
        default=None,
        description="Corpus, packed there if absent; null: one in the user's cache folder.",
    )
    max_bytes: Count = Field(
        default=8 * 1024 * 1024, description="Maximum bytes of source text to pack."
    )
    validation_fraction: Shrinking = Field(
        default=0.05, description="Fraction of the files for validation."
    )

    @field_validator("path")
    @classmethod
    def _path_from_here(cls, path: str | None) -> str | None:
        return _from_here(path)


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
        return _splits_over_heads(width, others)


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
        return None if paths is None else [str(_from_here(path)) for path in paths]

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


class DigitsData(BaseModel):
    """The ``data`` keys of the tasks on digits: the fractions of the splits."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    validation_fraction: Shrinking = Field(
        default=0.15, description="Fraction of the images for validation."
    )
    test_fraction: Shrinking = Field(
        default=0.15, description="Fraction of the images for the report at the end."
    )

    @field_validator("test_fraction")
    @classmethod
    def _leaves_some_to_train_on(cls, fraction: float, others: ValidationInfo) -> float:
        kept = others.data.get("validation_fraction", 0.0)
        if fraction + kept >= 1:
            raise ValueError(
                f"{fraction:g} and data.validation_fraction={kept:g} leave nothing to train on; "
                "together they should be less than 1"
            )
        return fraction


class ClassifierShape(BaseModel):
    """The ``model`` section of the classifier: a small convolutional network."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    blocks: Count = Field(default=2, description="Residual convolutions.")
    channels: Count = Field(default=16, description="Channels of each convolution.")
    dropout: BelowOne = Field(
        default=0.1,
        description="Fraction of features set to zero in training before the last layer.",
    )


class AutoencoderShape(BaseModel):
    """The ``model`` section of the variational autoencoder."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    hidden: Count = Field(
        default=128, description="Units of the encoder's and the decoder's hidden layer."
    )
    latent: Count = Field(default=8, description="Length of an image's code.")


class AutoencoderData(DigitsData):
    """The ``data`` keys of the autoencoder."""

    reconstructions: ShellText | None = Field(
        default=None,
        description="HDF5 file for test images, reconstructions and codes; null: none.",
    )

    @field_validator("reconstructions")
    @classmethod
    def _path_from_here(cls, path: str | None) -> str | None:
        return _from_here(path)


def _from_here(path: str | None) -> str | None:
    if path is None:
        return None
    if not path:
        raise ValueError("is empty; omit the key, or write null")
    # The job may start in another folder, so relative paths become absolute here.
    return str(Path(path).expanduser().absolute())


LANGUAGE_MODEL = (LanguageModelShape, LanguageModelData)
TOKEN_MODEL = (TokenModelShape, TokenData)
CLASSIFIER = (ClassifierShape, DigitsData)
AUTOENCODER = (AutoencoderShape, AutoencoderData)
