"""docs/benchmarks.md names every benchmark, with options that exist, and its short versions run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import code_blocks

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools" / "bench"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
SMALL = [line for text in code_blocks(PAGE, "bash") for line in text.splitlines()]
COMMANDS = [*SMALL, *re.findall(r"`((?:python )?tools/bench/[^`]*)`", PAGE)]


def test_every_benchmark_is_on_the_page_with_a_short_version() -> None:
    programs = {f"tools/bench/{path.name}" for path in BENCH.glob("*.py")}
    for commands in (COMMANDS, SMALL):
        named = {word for command in commands for word in command.split() if "tools/" in word}
        assert named == programs


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_valid_options(command: str) -> None:
    words = shlex.split(command)
    python = words.pop(0) if words[0] == "python" else None
    program = ROOT / words[0]
    assert python or os.access(program, os.X_OK)
    source = program.read_text(encoding="utf-8")
    assert python or source.startswith("#!/usr/bin/env python3\n")
    for word in words[1:]:
        assert not word.startswith("--") or f'"{word}"' in source


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALL)
def test_every_short_version_runs(command: str, tmp_path: Path) -> None:
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 2
