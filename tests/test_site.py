"""The documentation site builds without a warning and holds every page, command and public name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import hpcrun
import hpcrun.config
import hpcrun.ports
from hpcrun.cli.main import COMMANDS
from tests.support.jobs import PATIENCE

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_every_command_has_a_page_with_its_options(site: Path) -> None:
    for name in COMMANDS:
        page = (site / "commands" / name / "index.html").read_text(encoding="utf-8")
        assert f"usage: hpcrun {name}" in page, name


@pytest.mark.parametrize("module", [hpcrun, hpcrun.config, hpcrun.ports])
def test_every_public_name_has_a_heading(site: Path, module: object) -> None:
    name = module.__name__  # type: ignore[attr-defined]
    page = (site / "api" / name / "index.html").read_text(encoding="utf-8")
    headings = set(re.findall(r"<h2[^>]*>\s*([\w.]+)", page))
    public = [one for one in module.__all__ if not one.startswith("_")]  # type: ignore[attr-defined]
    assert {f"{name}.{one}" for one in public} <= headings


def test_the_reference_shows_config_keys_inherited_methods_and_no_roles(site: Path) -> None:
    config = (site / "api/hpcrun.config/index.html").read_text(encoding="utf-8")
    for section in (hpcrun.config.Train, hpcrun.config.Job, hpcrun.config.Checkpoint):
        assert not [key for key in section.model_fields if f"<code>{key}</code>" not in config]
    page = (site / "api/hpcrun/index.html").read_text(encoding="utf-8")
    assert "save_checkpoint" in page
    assert not re.findall(r":(?:meth|class|func|attr):", page + config)


def test_every_page_of_docs_is_in_the_menu() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"(\S+\.md)$", text, re.MULTILINE)
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert pages <= set(listed)
    assert {f"commands/{name}.md" for name in COMMANDS} <= set(listed)
    assert yaml.safe_load(text)["hooks"] == ["tools/docs_hooks.py"]
