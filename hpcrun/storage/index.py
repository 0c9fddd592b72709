"""The index of a checkpoint: it maps each chunk of each tensor to a byte range of a file.

torch's format stores this mapping as a pickle, and unpickling executes code. This index is JSON, which any
program can read. Every chunk has a hash, so that a rank which reads a tenth of a file verifies only
that tenth.
"""

import json
import math
import operator
from dataclasses import dataclass
from typing import Any

from hpcrun.storage.errors import CheckpointError, DamagedCheckpoint
from hpcrun.storage.manifest import require_file_name

INDEX = "index.json"
_FORMAT = 1
_MALFORMED = (
    *(ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError),
    CheckpointError,
)


@dataclass(frozen=True)
class Place:
    """``length`` bytes of ``file`` from ``position``, and their XXH3-128."""

    file: str
    position: int
    length: int
    xxh3: str


@dataclass(frozen=True)
class Piece:
    """A chunk of a tensor, dense and row-major: ``sizes`` elements from ``offsets``, per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of ``shape``, covered by its pieces. ``dtype`` is torch's name without ``torch.``."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Index:
    """All tensors by name, and all blobs (plain data saved by ``torch.save``) by name."""

    tensors: dict[str, TensorEntry]
    blobs: dict[str, Place]


def encode(index: Index) -> bytes:
    """Return ``index`` as JSON text, one tensor per line."""
    files = sorted({place.file for place in places(index)})
    numbers = {name: number for number, name in enumerate(files)}

    def row(place: Place) -> list[object]:
        return [numbers[place.file], place.position, place.length, place.xxh3]

    tensors = ",\n".join(
        f"  {json.dumps(name)}: "
        + json.dumps(
            [entry.dtype, entry.shape]
            + [[piece.offsets, piece.sizes, *row(piece.place)] for piece in entry.pieces]
        )
        for name, entry in index.tensors.items()
    )
    blobs = json.dumps({name: row(place) for name, place in index.blobs.items()})
    return (
        f'{{"format": {_FORMAT},\n "files": {json.dumps(files)},\n "blobs": {blobs},\n'
        f' "tensors": {{\n{tensors}\n }}}}\n'
    ).encode()


def decode(raw: bytes) -> Index:
    """Decode the result of :func:`encode`; raises DamagedCheckpoint if ``raw`` is invalid."""
    try:
        values = json.loads(raw)
        if values["format"] != _FORMAT:  # a new format gets a new format of the manifest too
            raise ValueError(values["format"])
        files = [str(name) for name in values["files"]]
        for name in files:
            require_file_name(name)

        def place(row: list[Any]) -> Place:
            number, position, length, xxh3 = row
            return Place(files[number], int(position), int(length), str(xxh3))

        tensors = {}
        for name, (dtype, shape, *pieces) in values["tensors"].items():
            tensors[name] = TensorEntry(
                str(dtype),
                tuple(map(int, shape)),
                tuple(
                    Piece(tuple(map(int, offsets)), tuple(map(int, sizes)), place(row))
                    for offsets, sizes, *row in pieces
                ),
            )
        blobs = {name: place(row) for name, row in values["blobs"].items()}
    except _MALFORMED as error:
        raise DamagedCheckpoint(f"{INDEX}: not a valid index") from error
    return Index(tensors, blobs)


def covered(entry: TensorEntry) -> bool:
    """Return True if all pieces are within the tensor, and have as many elements together."""
    inside = all(
        len(piece.offsets) == len(piece.sizes) == len(entry.shape)
        and all(map(operator.le, map(operator.add, piece.offsets, piece.sizes), entry.shape))
        for piece in entry.pieces
    )
    return inside and sum(math.prod(each.sizes) for each in entry.pieces) == math.prod(entry.shape)


def places(index: Index) -> list[Place]:
    """Return the byte ranges of all tensors and blobs."""
    found = list(index.blobs.values())
    for entry in index.tensors.values():
        found += [piece.place for piece in entry.pieces]
    return found
