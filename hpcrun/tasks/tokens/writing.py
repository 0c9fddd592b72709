"""Write a folder of token shards; it appears complete or not at all."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

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
        end_token: token to append to every document; None: no token.
        shard_tokens: a shard ends with the document that reaches this number of tokens.
        validation: True for the names of the documents to hold out.

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
            f"{folder}: cannot be written: {error.strerror or error}; choose another folder, or free space"
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
