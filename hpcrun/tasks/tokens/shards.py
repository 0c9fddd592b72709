"""The format of token shards, and the check of a folder or a flat file of tokens.

A folder holds ``tokens.json`` and its shards. A shard is two files:

- ``train-00000.bin``: the tokens, little-endian uint16 or uint32, without a header;
- ``train-00000.ends.npy``: int64 [documents], where each document ends (exclusive), ascending; the last
  is the number of tokens.

``tokens.json`` has ``format``, ``dtype``, ``vocabulary`` (number of tokens), ``tokenizer``, ``end_token``
(number of the token after each document, or null) and ``splits``: for ``train`` and ``validation`` a list of
shards, each with ``file``, ``tokens``, ``documents`` and ``sha256`` (of the tokens, then of the ends).

A flat file is a ``.bin`` without a description, as nanoGPT writes it.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcrun.errors import UserError

FORMAT = "hpcrun-tokens 1"
DESCRIPTION = "tokens.json"
DTYPES = ("uint16", "uint32")
_AGAIN = "make it again with python -m hpcrun.tasks.tokens"


class TokenError(UserError):
    """Tokens cannot be read or written."""


@dataclass
class Shard:
    """One file of tokens, mapped into memory at its first use in each process.

    ``documents``: None if the file has no index of documents.
    """

    path: Path
    dtype: str
    tokens: int
    documents: int | None = None
    sha256: str | None = None
    _values: Any = field(default=None, repr=False)
    _ends: Any = field(default=None, repr=False)

    @property
    def values(self) -> "NDArray[Any]":
        """The tokens: uint16 or uint32 [tokens]."""
        if self._values is None:
            kind = np.dtype(self.dtype).newbyteorder("<")
            try:
                self._values = np.memmap(self.path, kind, "r", shape=(self.tokens,))
            except (OSError, ValueError) as error:
                raise TokenError(f"{self.path}: cannot be read: {_one_line(error)}") from error
        return self._values  # type: ignore[no-any-return]

    @property
    def ends(self) -> "NDArray[np.int64]":
        """The end of each document: int64 [documents]."""
        if self._ends is None:
            self._ends = _read_ends(ends_path(self.path), self.documents, self.tokens)
        return self._ends  # type: ignore[no-any-return]

    def check(self, *, hashes: bool) -> None:
        """Read the index of documents, and with ``hashes`` everything. Raises TokenError for damage."""
        if self.documents is not None:
            ends = np.asarray(self.ends)
            if (np.diff(ends, prepend=0) <= 0).any():
                raise TokenError(
                    f"{ends_path(self.path)}: damaged: its ends do not ascend; {_AGAIN}"
                )
        if hashes and self.sha256 is not None:
            digest = hashlib.sha256()
            for path in (self.path, ends_path(self.path)):
                _hash(path, digest)
            if digest.hexdigest() != self.sha256:
                raise TokenError(
                    f"{self.path}: damaged: its SHA-256 is not that of {DESCRIPTION}; {_AGAIN}"
                )

    def __getstate__(self) -> dict[str, Any]:
        # A loader process maps the file itself.
        return {**self.__dict__, "_values": None, "_ends": None}


@dataclass(frozen=True)
class TokenSource:
    """The shards of a folder's split, or of a flat file. A flat file names no vocabulary and no tokenizer."""

    path: Path
    shards: list[Shard]
    vocabulary: int | None = None
    tokenizer: str | None = None
    end_token: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(shard.tokens for shard in self.shards)


def ends_path(shard: Path) -> Path:
    """Return the path of the index of documents of a shard."""
    return shard.with_suffix(".ends.npy")


def open_source(path: Path, split: str, dtype: str) -> TokenSource:
    """Check the sizes of all files at ``path``, and return the shards of ``split``.

    A flat file has no splits: all of it is returned. Reads no tokens, so every rank may call it.

    Raises:
        TokenError: a file is missing, has another size, or is not a description of tokens.
    """
    try:
        if path.is_dir():
            return _open_folder(path, split)
        return TokenSource(path, [_flat(path, dtype)])
    except OSError as error:
        raise TokenError(
            f"{path}: cannot be read: {_one_line(error)}; name a folder of token shards or a flat file "
            "that every node can read"
        ) from error


def has_split(path: Path, split: str) -> bool:
    """Return True if ``path`` is a folder with described shards of ``split``. Raises TokenError."""
    try:
        return path.is_dir() and bool(_description(path)["splits"].get(split))
    except OSError as error:
        raise TokenError(f"{path}: cannot be read: {_one_line(error)}") from error


def _open_folder(folder: Path, split: str) -> TokenSource:
    described = _description(folder)
    if not described["splits"].get(split):
        raise TokenError(f"{folder}: has no {split} tokens; {_AGAIN}, or name another folder")
    shards = []
    for one in described["splits"][split]:
        path = folder / one["file"]
        shard = Shard(
            path,
            described["dtype"],
            one["tokens"],
            documents=one["documents"],
            sha256=one["sha256"],
        )
        wanted = one["tokens"] * np.dtype(shard.dtype).itemsize
        size = path.stat().st_size
        if size != wanted:
            raise TokenError(
                f"{path}: damaged: {size} bytes instead of {wanted} ({one['tokens']} tokens); {_AGAIN}"
            )
        _ = shard.ends
        shards.append(shard)
    return TokenSource(
        folder, shards, described["vocabulary"], described["tokenizer"], described["end_token"]
    )


def _description(folder: Path) -> dict[str, Any]:
    """Return the content of ``tokens.json``, with the keys and types of the format."""
    path = folder / DESCRIPTION
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        if found["dtype"] not in DTYPES:
            raise ValueError(f"its dtype is {found['dtype']!r}")
        numbers = [found["vocabulary"]]
        for shards in found["splits"].values():
            for shard in shards:
                numbers += [shard["tokens"], shard["documents"]]
                if Path(shard["file"]).name != shard["file"] or not isinstance(
                    shard["sha256"], str
                ):
                    raise ValueError(f"its shard {shard['file']!r} is not a name in this folder")
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError("a count is not a positive number")
        _ = found["tokenizer"], found["end_token"]
    except FileNotFoundError:
        raise TokenError(
            f"{folder}: has no {DESCRIPTION}; name a folder made by python -m hpcrun.tasks.tokens, or a "
            "flat .bin file"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenError(
            f"{path}: is not a description of {FORMAT}: {_one_line(error)}; {_AGAIN}"
        ) from error
    return found  # type: ignore[no-any-return]


def _flat(path: Path, dtype: str) -> Shard:
    size, item = path.stat().st_size, np.dtype(dtype).itemsize
    if size % item or not size:
        raise TokenError(
            f"{path}: {size} bytes are not a whole number of {dtype} tokens; the file is truncated, or "
            "data.dtype is wrong"
        )
    return Shard(path, dtype, size // item)


def _read_ends(path: Path, documents: int | None, tokens: int) -> "NDArray[np.int64]":
    try:
        ends = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise TokenError(f"{path}: damaged: {_one_line(error)}; {_AGAIN}") from error
    if ends.shape != (documents,) or ends.dtype != np.dtype("<i8") or ends[-1] != tokens:
        raise TokenError(
            f"{path}: damaged: not the {documents} ends of documents with {tokens} tokens; {_AGAIN}"
        )
    return ends  # type: ignore[no-any-return]


def _hash(path: Path, digest: Any) -> None:
    for piece in blocks(path):
        digest.update(piece)


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks of a MiB. Raises TokenError."""
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece
    except OSError as error:
        raise TokenError(f"{path}: cannot be read: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]}"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
