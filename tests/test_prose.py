"""The prose of each area stays below its limits in tools/prose.py."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def loaded() -> ModuleType:
    """Return the module tools/prose.py."""
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up.
    sys.modules["prose"] = module
    spec.loader.exec_module(module)
    return module


PROSE = loaded()


@pytest.mark.parametrize("area", list(PROSE.CEILINGS))
def test_an_area_stays_below_its_limits(area: str) -> None:
    found = PROSE.measure(area)
    assert not PROSE.above(area, found), "tools/prose.py --list AREA prints the places"


def test_words_count_in_prose_and_not_in_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROSE, "ROOT", tmp_path)
    page = "Nobody is told.\n\n```\nnobody\n```\n`told` and\nwhose\n"
    (tmp_path / "page.md").write_text(page)
    found = PROSE.measure("page.md")
    places = ["page.md:1: Nobody", "page.md:1: told", "page.md:7: whose"]
    assert (found.places, found.words) == (places, 5)
