"""The pages about training: their commands run, their programs print what they show, and their keys exist."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.config import Config
from hpcrun.config.schema import known_keys
from hpcrun.config.tasks.language_model import LanguageModelData
from tests.support.pages import package
from tests.support.start_server import prepared

ROOT = Path(__file__).parents[1]
PAGES = ("training", "tasks", "large-models", "determinism", "errors")
PAGE = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in PAGES)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [text for language, text in BLOCKS if language == "bash"]
SECTIONS = "job|restarts|train|fsdp|optim|amp|watch|data|checkpoint"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of a reader of the pages: a checkout, and ``hpcrun`` on the PATH."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "configs").symlink_to(ROOT / "configs")
    program = folder / "bin" / "hpcrun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hpcrun "$@"\n')
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_every_command_runs(number: int, folder: Path) -> None:
    environ = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        **prepared({"PYTHONPATH": package()}),
    }
    text = COMMANDS[number]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("nothing is submitted") == text.count("--dry-run")
    submitted = text.count("hpcrun submit") - text.count("--dry-run")
    assert len(re.findall(r"^hpcrun: \S+ is finished$", done.stdout, re.M)) == submitted


def test_each_block_of_commands_is_run_or_shown() -> None:
    assert any("--dry-run" not in text and "hpcrun submit" in text for text in COMMANDS)
    assert {language for language, _ in BLOCKS} == {"bash", "python", "text"}


def test_every_program_prints_the_table_below_it() -> None:
    programs = [number for number, (language, _) in enumerate(BLOCKS) if language == "python"]
    assert len(programs) == 3
    for number in programs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(BLOCKS[number][1], {})
        assert BLOCKS[number + 1] == ("text", printed.getvalue())


def test_every_key_that_the_pages_name_exists() -> None:
    known = {*known_keys(Config), *(f"data.{key}" for key in LanguageModelData.model_fields)}
    named = set(re.findall(rf"(?<![\w/.-])((?:{SECTIONS})\.[a-z_0-9]+)", PAGE))
    files = {"train.py", "job.env"}
    assert len(named) > 40
    assert named - files <= known, named - files - known
