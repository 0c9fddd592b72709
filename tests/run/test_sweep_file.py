"""sweep.json: what is written is read back, and a damaged file is named."""

from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import write_hashed
from hpcrun.run.sweep_file import (
    SweepFile,
    SweepRun,
    is_element,
    is_sweep,
    read_sweep,
    write_sweep,
)


def _sweep(folder: Path) -> SweepFile:
    runs = [SweepRun("000", {"optim.lr": 1e-4, "seed": 0}), SweepRun("001", {"optim.lr": 1e-4})]
    return SweepFile(folder, runs)


def test_a_sweep_is_read_as_written(tmp_path: Path) -> None:
    write_sweep(_sweep(tmp_path))
    assert read_sweep(tmp_path) == _sweep(tmp_path)
    assert is_sweep(tmp_path)
    assert is_element(RunDirectory(tmp_path / "000"))


def test_a_folder_without_the_file_is_no_sweep(tmp_path: Path) -> None:
    assert read_sweep(tmp_path) is None
    assert not is_sweep(tmp_path)


def test_elements_lie_in_the_sweep_folder(tmp_path: Path) -> None:
    found = _sweep(tmp_path).directories
    assert found["001"] == RunDirectory(tmp_path / "001")


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"version": 1}', '{"version": 4, "runs": 3}'],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(RunError, match=r"sweep\.json: (is damaged|has version)"):
        read_sweep(tmp_path)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    write_hashed(tmp_path / "sweep.json", {"version": 5})
    with pytest.raises(RunError, match="has version 5"):
        read_sweep(tmp_path)


def test_a_flipped_bit_changes_nothing_or_is_named(tmp_path: Path) -> None:
    write_sweep(_sweep(tmp_path))
    path = tmp_path / "sweep.json"
    raw = path.read_bytes()
    problems = []
    for place in range(len(raw)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << place % 7]) + raw[place + 1 :])
        try:
            assert read_sweep(tmp_path) == _sweep(tmp_path)
        except RunError as error:
            problems.append(str(error))
    assert all(line.startswith(f"{path}: ") and "\n" not in line for line in problems)
    # The other bits are white space between the values.
    assert len(problems) > len(raw) // 2
