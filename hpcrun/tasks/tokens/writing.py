"""Write a folder of token shards; it appears complete or not at all."""

import gzip
import hashlib
import importlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from hpcrun.drafts import draft_folder, sync
from hpcrun.tasks.tokens.shards import DESCRIPTION, FORMAT, TokenError, blocks, ends_path

VALIDATION, TRAIN = "validation", "train"

_PATIENCE = 86400.0
"""Seconds: documents may come slowly, and a shard is written when it is full."""


def write_folder(
    folder: Path,
    documents: Iterable[tuple[str, Sequence[int]]],
    *,
    vocabulary: int,
    tokenizer: str,
    end_token: int | None,
    shard_tokens: int,
    validation: Callable[[str], bool],
) -> dict[str, Any]:
    """Write ``documents``, pairs of a name and tokens, and return the description.

    What killed writers of the same folder have left is removed first.

    Args:
        shard_tokens: a shard ends with the document that reaches this number of tokens.

    Raises:
        TokenError: the folder exists or cannot be written, or there are no documents to train on.
    """
    if folder.exists() or folder.is_symlink():
        raise TokenError(f"{folder}: exists already; remove it, or name another folder")
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    try:
        with draft_folder(folder, _PATIENCE) as draft:
            writers = {
                split: _Split(draft, split, dtype, shard_tokens) for split in (TRAIN, VALIDATION)
            }
            ending = [] if end_token is None else [end_token]
            for name, tokens in documents:
                if len(tokens):
                    writers[VALIDATION if validation(name) else TRAIN].add([*tokens, *ending])
            shards = {split: writer.finish() for split, writer in writers.items()}
            if not shards[TRAIN]:
                raise TokenError(
                    f"{folder}: the input has no documents to train on; give more text"
                )
            described: dict[str, Any] = {
                "format": FORMAT,
                "dtype": dtype,
                "vocabulary": vocabulary,
                "tokenizer": tokenizer,
                "end_token": end_token,
                "splits": {split: made for split, made in shards.items() if made},
            }
            (draft / DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n")
            for path in (*draft.iterdir(), draft):
                sync(path)
            draft.rename(folder)
            sync(folder.parent)
    except OSError as error:
        raise TokenError(
            f"{folder}: cannot be written: {error.strerror or error}; choose another folder (data.path, "
            "XDG_CACHE_HOME), or free space"
        ) from error
    return described


class _Split:
    """The shards of a split, written one after the other."""

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int) -> None:
        self._folder, self._split, self._limit = folder, split, shard_tokens
        self._type = np.dtype(dtype).newbyteorder("<")
        self._shards: list[dict[str, Any]] = []
        self._waiting: list[np.ndarray[Any, Any]] = []
        self._ends: list[int] = []

    def add(self, tokens: Sequence[int]) -> None:
        self._waiting.append(np.asarray(tokens, dtype=self._type))
        self._ends.append(len(tokens) + (self._ends[-1] if self._ends else 0))
        if self._ends[-1] >= self._limit:
            self._flush()

    def finish(self) -> list[dict[str, Any]]:
        if self._ends:
            self._flush()
        return self._shards

    def _flush(self) -> None:
        path = self._folder / f"{self._split}-{len(self._shards):05d}.bin"
        np.concatenate(self._waiting).tofile(path)
        np.save(ends_path(path), np.array(self._ends, dtype="<i8"))
        digest = hashlib.sha256()
        for written in (path, ends_path(path)):
            for piece in blocks(written):
                digest.update(piece)
        self._shards.append(
            {
                "file": path.name,
                "tokens": self._ends[-1],
                "documents": len(self._ends),
                "sha256": digest.hexdigest(),
            }
        )
        self._waiting, self._ends = [], []


def drawn(fraction: float) -> Callable[[str], bool]:
    """Return a function that holds out this fraction of the names, by a hash, in any order."""

    def held_out(name: str) -> bool:
        digest = hashlib.sha256(os.fsencode(name)).digest()
        return int.from_bytes(digest[:6], "big") < fraction * 2**48

    return held_out


@dataclass(frozen=True)
class Tokenizer:
    """Turns texts into numbers below ``vocabulary``, which counts the end token.

    Two tokenizers with the same ``name`` give the same tokens. ``end_token``: after each document; None: no
    token. ``encode`` returns the tokens of each text without the end token.
    """

    name: str
    vocabulary: int
    end_token: int | None
    encode: Callable[[list[str]], Iterable[Sequence[int]]]


def open_tokenizer(name: str, end_token: str | None) -> Tokenizer:
    """Return the tokenizer ``bytes``, or that of the file ``name`` (``tokenizer.json``).

    Args:
        end_token: text of the token after each document, such as ``<|endoftext|>``; None: no token, and for
            ``bytes`` token 256.

    Raises:
        TokenError: the file or the package is missing, or the tokenizer has no such token.
    """
    if name == "bytes":
        if end_token is not None:
            raise TokenError("--end-token: is for a tokenizer file; the end token of bytes is 256")
        return Tokenizer("bytes", 257, 256, lambda texts: map(str.encode, texts))
    try:
        reading = importlib.import_module("tokenizers")
    except ImportError as error:
        raise TokenError(
            f"--tokenizer: {name}: needs the package tokenizers (pip install tokenizers); or use bytes"
        ) from error
    try:
        content = Path(name).read_bytes()
    except OSError as error:
        raise TokenError(
            f"--tokenizer: {name}: cannot be read: {error.strerror or error}"
        ) from error
    try:
        reader = reading.Tokenizer.from_str(content.decode())
    # The package raises plain Exception for a file with other content.
    except Exception as error:
        text = " ".join(str(error).split())
        raise TokenError(f"--tokenizer: {name}: is not a tokenizer file: {text}") from error
    number = None if end_token is None else reader.token_to_id(end_token)
    if end_token is not None and number is None:
        raise TokenError(f"--end-token: {name} has no token {end_token}; use one of its tokens")
    # The numbers of added tokens may have gaps.
    vocabulary = max(reader.get_vocab(with_added_tokens=True).values()) + 1
    digest = hashlib.sha256(content).hexdigest()[:16]

    def encode(texts: list[str]) -> Iterator[Sequence[int]]:
        # Without the tokens that a template adds.
        for encoding in reader.encode_batch(texts, add_special_tokens=False):
            yield encoding.ids

    return Tokenizer(f"{Path(name).name} {digest}", vocabulary, number, encode)


_LINES = (".jsonl", ".jsonl.gz", ".json.gz", ".ndjson")
_AT_ONCE = 1000


def documents(paths: list[Path], field: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document.

    A file of JSON lines (``.jsonl``, ``.ndjson``, ``.json.gz``) has a document in ``field`` of each line. Any
    other file is one document. Names do not contain the folder.

    Raises:
        TokenError: a file cannot be read, is not UTF-8, or a line lacks the field.
    """
    for path in paths:
        try:
            with _open(path) as file:
                if not path.name.endswith(_LINES):
                    yield path.name, file.read()
                    continue
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path.name}:{number}", _field(path, number, line, field)
        except (OSError, EOFError, zlib.error) as error:
            text = getattr(error, "strerror", None) or str(error)
            raise TokenError(f"{path}: cannot be read: {text}") from error
        except UnicodeDecodeError as error:
            raise TokenError(f"{path}: is not UTF-8 at byte {error.start}; convert it") from error


def tokenized(
    found: Iterator[tuple[str, str]], tokenizer: Tokenizer
) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and the tokens of each document; a thousand documents at a time use all cores."""
    while some := list(islice(found, _AT_ONCE)):
        encoded = tokenizer.encode([text for _, text in some])
        for (name, _), tokens in zip(some, encoded, strict=True):
            yield name, list(tokens)


def _open(path: Path) -> IO[str]:
    # newline="": a text keeps its own ends of lines.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _field(path: Path, number: int, line: str, field: str) -> str:
    try:
        found = json.loads(line)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise TokenError(
            f"{path}:{number}: has no {field} in a JSON object; name the field with --field"
        ) from error
    if not isinstance(found, str):
        raise TokenError(f"{path}:{number}: {field} is not text; name another field with --field")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise TokenError(
            f"{path}:{number}: {field} has half of a surrogate pair at character {error.start}; remove it"
        ) from error
    return found
