"""sweep.json: what is written is read back, and a damaged file is named."""

from pathlib import Path

import pytest

from hpcrun.run.directory import RunError
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
    assert (read_sweep(tmp_path), is_sweep(tmp_path)) == (None, False)
    write_sweep(_sweep(tmp_path))
    assert read_sweep(tmp_path) == _sweep(tmp_path)
    assert is_sweep(tmp_path)
    assert is_element(_sweep(tmp_path).directories["001"])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[]", "is damaged"),
        ("{", "is damaged"),
        ('{"version": 4, "runs": 3}', "is damaged"),
        ('{"version": 5}', "has version 5"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(RunError, match=rf"sweep\.json: {text}"):
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
