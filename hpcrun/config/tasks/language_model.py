"""Options of the language model: its shape and its data. Checks of them need no torch, unlike the task."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from hpcrun.config.fields import (
    BelowOne,
    Count,
    FromZero,
    Positive,
    Section,
    ShellText,
    Shrinking,
)

BYTES = 256
"""Vocabulary of a model of bytes: no tokenizer to train, download or version."""

# Tensor cores are fastest with multiples of 128: NVIDIA, "Matrix Multiplication Background User's Guide".
VOCABULARY_UNIT = 128


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


def all_from_here(paths: list[str]) -> list[str]:
    """Return the absolute form of ``paths``; raises ValueError if a path is empty."""
    return [found for path in paths if (found := from_here(path))]


def divides_heads(count: int | None, others: ValidationInfo) -> int | None:
    """Return ``count`` if it divides the number of heads among the ``others``; else raise ValueError."""
    heads = others.data.get("heads")
    if count is not None and heads is not None and heads % count:
        near = [str(fits) for fits in range(1, heads + 1) if heads % fits == 0]
        raise ValueError(
            f"should divide model.heads = {heads}, unlike {count}: use {' or '.join(near)}"
        )
    return count


def in_vocabulary(token: int | None, others: ValidationInfo) -> int | None:
    """Return ``token`` if it is in the vocabulary among the ``others``; else raise ValueError."""
    size = others.data.get("vocabulary")
    if token is not None and size is not None and token >= size:
        raise ValueError(f"is {token}, outside model.vocabulary = {size}; no document would end")
    return token


class RopeScaling(Section):
    """Rotary positions for a longer context than in the first training, as in Llama 3.1 and 3.2.

    Names and meaning of ``rope_scaling`` in ``transformers.LlamaConfig``, type ``llama3``.
    """

    factor: Positive = Field(description="Divides the frequencies of slow pairs.")
    low_freq_factor: Positive = Field(
        default=1.0, description="Pairs are slow if fewer turns fit the original context."
    )
    high_freq_factor: Positive = Field(
        default=4.0, description="Pairs with at least so many turns stay as they are."
    )
    original_max_position_embeddings: Count = Field(
        default=8192, description="Context of the first training."
    )


class LanguageModelShape(Section):
    """The ``model`` section of the language model: the architecture of Llama."""

    layers: Count = Field(default=4, description="Transformer blocks.")
    heads: Count = Field(
        default=4, description="Attention heads per block, which divide the width."
    )
    kv_heads: Annotated[Count | None, AfterValidator(divides_heads)] = Field(
        default=None, description="Heads of keys and values, which divide heads; null: as heads."
    )
    width: Annotated[Count, AfterValidator(splits_over_heads)] = Field(
        default=128, description="Length of the vector of one byte or token."
    )
    mlp_width: Count | None = Field(
        default=None,
        description="Width inside the MLP; null: 8/3 of width, rounded to a multiple of 64.",
    )
    vocabulary: Count = Field(
        default=BYTES, description="Number of tokens; 256: bytes. Llama 3: 128256."
    )
    tied: bool = Field(default=True, description="Use one matrix for the embedding and the head.")
    rope_base: Positive = Field(
        default=10000.0, description="Base of the rotary positions. Llama 3: 500000."
    )
    rope_scaling: RopeScaling | None = Field(
        default=None, description="Rotary positions of Llama 3.1 and 3.2; null: not scaled."
    )
    norm_eps: Positive = Field(default=1e-5, description="Term added in RMSNorm.")
    context: Count = Field(
        default=128, description="Bytes or tokens in a sample, and in the context."
    )
    document_end: Annotated[FromZero | None, AfterValidator(in_vocabulary)] = Field(
        default=None,
        description="Token at the end of each document; attention stays in a document. null: in a sample.",
    )
    dropout: BelowOne = Field(
        default=0.0, description="Fraction of activations set to zero in training; 0: none."
    )

    @property
    def head_width(self) -> int:
        """Length of the vector of a head."""
        return self.width // self.heads

    @property
    def key_value_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def inner_width(self) -> int:
        """Width inside the MLP; the default has the parameters of 4 x width without a gate."""
        return self.mlp_width or max(64, round(8 * self.width / 3 / 64) * 64)

    @property
    def rows(self) -> int:
        """Rows of the embedding and the head."""
        return -(-self.vocabulary // VOCABULARY_UNIT) * VOCABULARY_UNIT


def with_tokens(files: list[str], others: ValidationInfo) -> list[str]:
    """Return ``files`` if there are files of tokens to train on too; else raise ValueError."""
    if files and not others.data.get("tokens"):
        raise ValueError("needs data.tokens, the files to train on")
    return files


class LanguageModelData(Section):
    """The task's keys of the ``data`` section: the text to train on.

    Without ``tokens`` the text is Python's standard library: ``max_bytes`` and ``validation_fraction``
    control its packing, and an existing corpus at ``path`` is used unchanged.
    """

    path: Annotated[ShellText | None, AfterValidator(from_here)] = Field(
        default=None,
        description="Corpus of bytes, packed there if absent; null: in the user's cache folder.",
    )
    max_bytes: Count = Field(
        default=8 * 1024 * 1024, description="Maximum bytes of source text to pack."
    )
    validation_fraction: Shrinking = Field(
        default=0.05, description="Fraction of the files for validation."
    )
    tokens: Annotated[list[ShellText], AfterValidator(all_from_here)] = Field(
        default=[],
        description="Flat files of tokens to train on, instead of the corpus; may repeat a file.",
    )
    validation_tokens: Annotated[
        list[ShellText], AfterValidator(all_from_here), AfterValidator(with_tokens)
    ] = Field(default=[], description="Flat files of tokens to validate on.")
    dtype: Literal["uint16", "uint32"] = Field(
        default="uint16", description="Type of a token in the files."
    )
