"""docs/first-task.md: its program trains with its commands, and prints the lines that the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.pages import code_blocks, package

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "first-task.md").read_text(encoding="utf-8")


def test_the_pages_program_trains_and_prints_what_the_page_shows(tmp_path: Path) -> None:
    (program,), (shown,) = code_blocks(PAGE, "python"), code_blocks(PAGE, "text")
    train, look, _ = code_blocks(PAGE, "bash")
    (tmp_path / "my_module.py").write_text(program)
    (tmp_path / "hpcrun").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hpcrun "$@"\n')
    (tmp_path / "hpcrun").chmod(0o755)
    environ = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": package(),
    }
    done = subprocess.run(
        ["bash", "-euc", train + look],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    def plain(text: str) -> list[str]:
        """Return the lines without numbers and paths, which differ between machines."""
        lines = re.sub(r"\S*/runs|\d[\d.,:]*", "#", text).splitlines()
        return [line for line in lines if not line.startswith("step")]

    printed = plain(done.stdout)
    assert printed[: len(plain(shown))] == plain(shown)
    # From the run, and from the log of rank 0.
    (loss,) = set(re.findall(r"^step 500/500: loss (\d\.\d+),", done.stdout, re.M))
    assert float(loss) < 0.01
    assert (tmp_path / "model.pt").is_file()
