"""sweep.json: what is written is read back, and a damaged file is named."""

import json
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.sweep_file import (
    SweepFile,
    SweepRun,
    SweepSubmission,
    is_element,
    is_sweep,
    read_sweep,
    write_sweep,
)


def _sweep(folder: Path) -> SweepFile:
    runs = [SweepRun("000", {"optim.lr": 1e-4, "seed": 0}), SweepRun("001", {"optim.lr": 1e-4})]
    sent = [SweepSubmission(12.5, "slurm", ["123"], ["000", "001"])]
    return SweepFile(folder, "lr", {"optim.lr": [1e-4], "seed": [0]}, runs, sent)


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
    ["", "[]", "{", '{"version": 1}', '{"version": 1, "name": "a", "axes": 3, "runs": []}'],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(RunError, match=r"sweep\.json: (is damaged|has version)"):
        read_sweep(tmp_path)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"version": 2}))
    with pytest.raises(RunError, match="has version 2"):
        read_sweep(tmp_path)
