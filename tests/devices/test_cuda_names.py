"""No module outside ``hpcrun/devices`` names CUDA in its code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hpcrun"
SEAM = ROOT / "devices"
# Names of others, which only occur as data.
ALLOWED: dict[str, set[str]] = {}


def names(tree: ast.AST) -> Iterator[str]:
    """Yield each identifier and each text of ``tree``, without docstrings."""
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and id(node) not in docstrings:
            # Messages and environment variables write it in capitals.
            yield from re.findall(r"[\w.:-]*cuda[\w.:-]*", text)


def naming_cuda(text: str) -> set[str]:
    """Return the names in a module's text that have CUDA in them."""
    return {name for name in names(ast.parse(text)) if "cuda" in name.lower()}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch.cuda.synchronize()", {"cuda"}),
        ("if device.type == 'cuda': pass", {"cuda"}),
        ("place = f'cuda:{index}'", {"cuda:"}),
        ("from torch.cuda import amp", {"torch.cuda"}),
        ("def f(is_cuda): pass", {"is_cuda"}),
        ('"""About torch.cuda."""\nprint(\'CUDA_VISIBLE_DEVICES\')  # cuda', set()),
    ],
)
def test_each_kind_of_name_is_found(text: str, found: set[str]) -> None:
    assert naming_cuda(text) == found


def test_only_the_device_package_names_cuda() -> None:
    found = {}
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        rest = naming_cuda(path.read_text(encoding="utf-8")) - ALLOWED.get(place, set())
        if rest and SEAM not in path.parents:
            found[place] = rest
    assert found == {}
