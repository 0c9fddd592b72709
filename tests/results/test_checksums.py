"""A flipped bit of results.h5 is found by hpcrun, and in the data also by other programs."""

import random
from pathlib import Path

import h5py
import pytest

from hpcrun.cli.main import guarded
from hpcrun.errors import ResultsError
from hpcrun.results.store import ResultsFile
from tests.results.conftest import MakeRun, collect


def flipped(raw: bytes, place: int, bit: int) -> bytes:
    """Return ``raw`` with one other bit."""
    return raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :]


@pytest.fixture
def file(tmp_path: Path, make_run: MakeRun) -> Path:
    for number in range(3):
        make_run(f"r{number}", [0.1 * n for n in range(60)], seed=number)
    collect(tmp_path)
    return tmp_path / "results.h5"


@pytest.mark.parametrize("flips", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_one_line_that_names_the_file(
    tmp_path: Path, file: Path, flips: int, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = file.read_bytes()
    draw = random.Random(flips)
    places = [0, 5, 40, 511, 512, 520, len(raw) - 1]
    places += [draw.randrange(len(raw)) for _ in range(flips - len(places))]
    for place in places:
        file.write_bytes(flipped(raw, place, draw.randrange(8)))
        for words in (["aggregate", str(tmp_path / "runs"), "-o"], ["compare"]):
            assert guarded([*words, str(file)]) == 2, place
            (line,) = capsys.readouterr().err.splitlines()
            assert f"{file}: is damaged, or another program has changed it" in line
    file.write_bytes(raw[:-100])
    with pytest.raises(ResultsError, match="is damaged"):
        ResultsFile(file)
    file.write_bytes(raw)
    assert not collect(tmp_path).written


def test_other_programs_get_an_error_for_a_flipped_number(file: Path) -> None:
    raw = file.read_bytes()
    with h5py.File(file) as content:
        tables = [content["runs"], content["summary"], content["run/r0/metrics"]]
        columns = [one for group in tables for one in group.values() if one.dtype.kind != "O"]
        assert all(one.fletcher32 for one in columns)
        places = {one.name: one.id.get_chunk_info(0).byte_offset for one in columns}
    assert len(places) > 15
    for name, place in places.items():
        file.write_bytes(flipped(raw, place, 3))
        with h5py.File(file) as content, pytest.raises(OSError, match=r"can't|filter|checksum"):
            content[name][:]
