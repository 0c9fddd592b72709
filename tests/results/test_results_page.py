"""docs/results.md: its programs run, and print what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpcrun.results.store import dictionary
from tests.results.conftest import MakeRun, collect

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def blocks(section: str) -> list[tuple[str, str]]:
    """Return language and text of each block in a section."""
    (text,) = re.findall(rf"^##+ {section}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_simulation_is_merged_as_the_page_shows(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "hpcrun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hpcrun "$@"\n')
    program.chmod(0o755)
    environ = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    shown = blocks("Samples of a simulation")
    printed = ""
    for language, text in shown:
        if language == "text":
            assert printed == text
            continue
        words = [sys.executable, "-c", text] if language == "python" else ["bash", "-euc", text]
        done = subprocess.run(
            words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    assert [language for language, _ in shown] == ["python", "bash", "text", "python", "text"]


def test_pandas_and_xarray_read_the_file(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("größe", [3.0, 2.0])
    make_run("b", [3.0])
    collect(tmp_path)
    monkeypatch.chdir(tmp_path)
    (language, _), (_, plain) = blocks("The file")
    assert language == "text"
    names: dict[str, object] = {}
    exec(plain, names)
    assert names["runs"]["run"].tolist() == ["b", "größe"]  # type: ignore[index]
    assert names["metrics"]["loss"].tolist() == [3.0]  # type: ignore[index]
    assert names["states"].tolist() == ["finished", "finished"]  # type: ignore[attr-defined]
    assert names["rates"].tolist() == [3e-4, 3e-4]  # type: ignore[attr-defined]
    assert names["losses"].tolist() == [3.0]  # type: ignore[attr-defined]
    assert names["unit"] == "s"
    (_, frames), (_, xarray) = blocks("Frames")
    exec(frames, {})
    exec(xarray.replace(', "step_time"', ', "time"'), names)
    data = names["data"]
    np.testing.assert_array_equal(data["loss"].loc["größe"], [3.0, 2.0])  # type: ignore[index]
    assert data["time"].attrs["units"] == "s"  # type: ignore[index]


def test_every_metric_of_a_task_is_in_the_data_dictionary() -> None:
    page = (ROOT / "docs" / "watching.md").read_text(encoding="utf-8")
    table = page[page.index("| key | meaning |") : page.index("A value that is not finite")]
    named = {
        name
        for row in table.split("\n\n")[0].splitlines()[2:]
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named - set(dictionary()["metrics"]) == set()
    for columns in dictionary().values():
        assert all(len(described) == 4 and all(described[2:]) for described in columns.values())
