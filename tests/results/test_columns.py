"""JSON lines as typed columns."""

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrun.results.collect.columns import columns_of, parse_rows, read_lines


def lines_of(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_columns_have_types() -> None:
    rows = [
        {"i": 1, "f": 0.5, "b": True, "s": "é", "n": 1, "big": 2**70},
        {"i": -2, "f": None, "b": False, "s": "", "n": 2.5, "big": 1},
    ]
    found = read_lines(io.BytesIO(lines_of(*rows))).columns
    kinds = {name: column.dtype.kind for name, column in found.items()}
    assert kinds == {"i": "i", "f": "f", "b": "b", "s": "S", "n": "f", "big": "f"}
    assert found["i"].tolist() == [1, -2]
    assert np.isnan(found["f"][1])
    assert found["s"][0].decode() == "é"
    assert found["big"][0] == 2.0**70


def test_rows_of_several_forms_leave_gaps() -> None:
    found = columns_of([{"a": 1, "t": "x"}, {"b": 2.0}, {"a": 3, "c": {"d": [1, 2], "e": 5}}])
    assert found.rows == 3
    assert found.columns["a"].tolist()[::2] == [1.0, 3.0]
    assert np.isnan(found.columns["a"][1])
    assert found.present["a"].tolist() == [True, False, True]
    assert found.columns["t"].tolist() == [b"x", b"", b""]
    assert found.columns["c.d"].tolist() == [b"", b"", b"[1,2]"]
    assert found.columns["c.e"][2] == 5


def test_damaged_and_torn_lines_are_counted_and_the_others_kept() -> None:
    assert parse_rows(b'{"a":[1\n2]}\n') == ([], 2)
    for last, rows, torn in ((b'{"a":3,"lo', 1, 10), (b'{"a":2}', 2, 0)):
        found = read_lines(io.BytesIO(b'{"a":1}\n' + last))
        assert (found.rows, found.torn, found.damaged) == (rows, torn, 0)
    data = b'{"a":1}\n\x00\x00\xff{\n[1]\n5\n{"a":NaN}\n\n{"a":4}\n'
    found = read_lines(io.BytesIO(data))
    assert (found.rows, found.damaged) == (3, 3)
    assert found.columns["a"].tolist()[::2] == [1.0, 4.0]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_blocks_join_to_the_same_columns(block: int) -> None:
    rows = [{"step": n, "x": n / 3 if n % 4 else None, "s": "y" * n} for n in range(9)]
    rows += [{"step": 9, "late": 1}, {"step": 10, "x": "text"}]
    found = read_lines(io.BytesIO(lines_of(*rows)), block_size=block)
    assert found.rows == 11
    assert found.columns["step"].tolist() == list(range(11))
    assert found.columns["late"][9] == 1
    assert np.isnan(found.columns["late"][0])
    assert found.columns["s"].tolist()[8] == b"yyyyyyyy"
    assert np.isnan(found.columns["x"][10])
    assert [one.rows.tolist() for one in found.misfits] == [[10]]
    assert float(found.columns["x"][1]) == pytest.approx(1 / 3)


def test_long_texts_are_cut_at_a_character() -> None:
    found = columns_of([{"s": "é" * 5000}])
    assert found.columns["s"][0].decode() == "é" * 500
    assert found.cut == ["texts of s are cut to 1000 bytes"]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), scalars), max_size=8))
def test_any_rows_become_columns_of_their_length(rows: list[dict[str, Any]]) -> None:
    found = columns_of(rows)
    assert found.rows == len(rows)
    for name, column in found.columns.items():
        assert len(column) == len(rows)
        for row, value in zip(rows, column.tolist(), strict=True):
            if type(row.get(name)) is float and column.dtype.kind == "f":
                assert value == row[name] or np.isnan(row[name])
