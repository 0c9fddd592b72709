"""docs/python.md: its programs run on the local cluster, and print the lines below them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import PATIENCE
from tests.support.pages import code_blocks, package

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "python.md").read_text(encoding="utf-8")
SHOWN = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)


NUMBER = re.compile(r"\d+\.\d+")


def test_the_programs_run_and_print_what_the_page_shows(tmp_path: Path) -> None:
    (task,) = code_blocks((DOCS / "first-task.md").read_text(), "python")
    (tmp_path / "my_module.py").write_text(task)
    shown = SHOWN.findall(PAGE)
    assert len(shown) == PAGE.count("```python") == 4
    (tmp_path / "page.py").write_text("".join(program for program, _ in shown))
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": package()},
        capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    expected = "".join(text for _, text in shown)
    assert NUMBER.sub("#", done.stdout) == NUMBER.sub("#", expected)
    # The last digits differ between machines.
    losses = [float(number) for number in NUMBER.findall(done.stdout)]
    assert losses == pytest.approx(list(map(float, NUMBER.findall(expected))), rel=0.05, abs=0.001)
