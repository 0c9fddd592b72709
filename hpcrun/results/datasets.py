"""Tables and documents as HDF5 datasets, in the forms of h5py's users.

A table is a group with a dataset for each column. Its attribute ``columns`` has the names in their order.
Texts are variable-length UTF-8, and a column with a unit has the attribute ``units``. A document is one JSON
text.

The low-level calls take a quarter of the time of h5py's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5o, h5p, h5s, h5t
from numpy.typing import NDArray

from hpcrun.results.collect.columns import structured

# A chunk of HDF5's cache. Below the second size, a filter saves less than it costs.
_CHUNK = 1 << 20
_COMPRESSED = 1 << 12
_LEVEL = 4
_TEXT = h5py.string_dtype("utf-8")
_COLUMNS, _UNITS = b"columns", b"units"


@lru_cache(maxsize=4096)
def link_names(columns: tuple[str, ...]) -> tuple[bytes, ...]:
    """Return a valid name of a dataset for each column, all different.

    HDF5 has no names with a slash, and no empty ones. ``train/loss`` becomes ``train__loss``.
    """
    found: dict[str, None] = {}
    for column in columns:
        stem = _valid(column).replace("/", "__")
        stem = f"_{stem}" if stem in ("", ".", "..") else stem
        name, number = stem, 1
        while name in found:
            number += 1
            name = f"{stem}~{number}"
        found[name] = None
    return tuple(map(str.encode, found))


class TableWriter:
    """Writes tables and documents; types are made once."""

    def __init__(self) -> None:
        self._types: dict[np.dtype[Any], Any] = {}
        self._text = h5t.py_create(_TEXT, logical=True)
        self._scalar = h5s.create(h5s.SCALAR)

    def table(self, parent: Any, name: str, records: NDArray[Any], units: Mapping[str, str]) -> int:
        """Write a table of ``records`` and return its bytes.

        Args:
            parent: the low-level id of a group.
            units: the unit of each column that has one.
        """
        group = h5g.create(parent, name.encode())
        columns = records.dtype.names or ()
        self._attribute(group, _COLUMNS, np.array(list(map(_valid, columns)), _TEXT))
        size = 0
        for column, link in zip(columns, link_names(columns), strict=True):
            dataset, stored = self._column(group, link, records[column])
            if unit := units.get(column):
                self._attribute(dataset, _UNITS, np.array(unit, _TEXT))
            size += stored
        return size

    def document(self, parent: Any, name: str, raw: bytes) -> int:
        """Write a JSON object as one text; return its bytes."""
        dataset = h5d.create(parent, name.encode(), self._text, self._scalar)
        dataset.write(h5s.ALL, h5s.ALL, np.array(raw, _TEXT))
        return len(raw)

    def _column(self, group: Any, link: bytes, column: NDArray[Any]) -> tuple[Any, int]:
        """Write a dataset; return it with its bytes."""
        space, plist = h5s.create_simple(column.shape), h5p.create(h5p.DATASET_CREATE)
        plist.set_obj_track_times(False)
        if column.dtype.kind == "S":
            values = np.array(list(map(_without_nul, column.tolist())), _TEXT)
            dataset = h5d.create(group, link, self._text, space, plist)
            if column.size:
                dataset.write(h5s.ALL, h5s.ALL, values)
            return dataset, sum(map(len, values))
        kind = self._types.get(column.dtype)
        if kind is None:
            kind = self._types[column.dtype] = h5t.py_create(column.dtype, logical=True)
        if column.size:
            plist.set_fill_time(h5d.FILL_TIME_NEVER)
            plist.set_chunk((min(column.size, _CHUNK // column.itemsize),))
            if column.nbytes >= _COMPRESSED:
                plist.set_shuffle()
                plist.set_deflate(_LEVEL)
            plist.set_fletcher32()
        dataset = h5d.create(group, link, kind, space, plist)
        if column.size:
            dataset.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(column), kind)
        return dataset, dataset.get_storage_size()

    def _attribute(self, owner: Any, name: bytes, value: NDArray[Any]) -> None:
        space = h5s.create_simple(value.shape) if value.shape else self._scalar
        h5a.create(owner, name, self._text, space).write(value)


class TableReader:
    """Reads tables and documents; types are made once."""

    def __init__(self) -> None:
        self._types: dict[bytes, np.dtype[Any] | None] = {}

    def table(
        self, parent: Any, name: str, wanted: Collection[str] | None = None
    ) -> NDArray[Any] | None:
        """Return the records of a table; its texts are UTF-8 bytes. None: there is no such table.

        Args:
            parent: the low-level id of a group.
            wanted: columns; all by default.
        """
        try:
            group = h5o.open(parent, name.encode())
        except KeyError:
            return None
        attribute = h5a.open(group, _COLUMNS)
        cells = np.empty(attribute.shape, _TEXT)
        attribute.read(cells)
        columns = tuple(map(bytes.decode, cells.tolist()))
        links = dict(zip(columns, link_names(columns), strict=True))
        found = {
            column: self.dataset(h5d.open(group, link))
            for column, link in links.items()
            if wanted is None or column in wanted
        }
        rows = h5d.open(group, links[columns[0]]).shape[0] if columns else 0
        return structured(found, rows)

    def dataset(self, dataset: Any) -> NDArray[Any]:
        """Return a whole dataset; its texts are bytes of one width."""
        kind = dataset.get_type()
        code = kind.encode()
        if code not in self._types:
            text = h5py.check_string_dtype(dataset.dtype)
            varies = text is not None and text.length is None
            self._types[code] = None if varies else dataset.dtype
        own = self._types[code]
        found = np.empty(dataset.shape, _TEXT if own is None else own)
        if found.size:
            dataset.read(h5s.ALL, h5s.ALL, found, None if own is None else kind)
        return found if own is not None else np.array(found.tolist(), "S")


def _valid(name: str) -> str:
    """Return ``name`` as UTF-8 without the character that ends a text in HDF5."""
    return name.replace("\0", "\\x00").encode(errors="backslashreplace").decode()


def _without_nul(text: bytes) -> bytes:
    """Return ``text`` without the byte that ends a text in HDF5."""
    return text.replace(b"\0", b"\\x00") if b"\0" in text else text
