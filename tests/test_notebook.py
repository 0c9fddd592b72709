"""docs/example.ipynb runs on this machine, and its stored outputs name no machine."""

import getpass
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import PATIENCE

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "example.ipynb"
PLACES = re.compile(
    r"/(?:home|root|tmp|work|Users|usr|opt|mnt|scratch)/|\b(?:\d{1,3}\.){3}\d{1,3}\b"
)


def outputs(path: Path) -> list[dict[str, Any]]:
    """Return the outputs of all code cells."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [output for cell in cells for output in cell.get("outputs", ())]


def shown(output: dict[str, Any]) -> str:
    """Return the text of an output, without pictures."""
    data = {kind: text for kind, text in output.get("data", {}).items() if kind != "image/png"}
    return json.dumps([output.get("text", ""), data])


def test_every_code_cell_was_executed_in_order() -> None:
    cells = json.loads(EXAMPLE.read_text(encoding="utf-8"))["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_the_stored_outputs_have_plots_and_name_no_machine() -> None:
    found = outputs(EXAMPLE)
    assert sum("image/png" in one.get("data", {}) for one in found) == 2
    text = " ".join(map(shown, found))
    assert PLACES.findall(text) == []
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)


def test_the_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    copy = tmp_path / "example.ipynb"
    copy.write_bytes(EXAMPLE.read_bytes())
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "notebook.py", copy],
        cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results, stored = outputs(copy), outputs(EXAMPLE)
    # A slow machine splits a stream.
    assert [one["data"].keys() for one in results if "data" in one] == [
        one["data"].keys() for one in stored if "data" in one
    ]
    assert "finished" in " ".join(map(shown, outputs(copy)))
