"""tools/measures.py counts imports and circles, and has a room for every module."""

import ast

from tools import measures


def test_every_module_has_a_room_without_circles() -> None:
    trees = measures.modules()
    assert {measures.room(name) for name in trees} >= {measures.BOTH, "in place", "sites"}
    unused = [name for name in measures.ROOMS if f"hpcrun.{name}" not in trees]
    assert unused in (["hpcrun", "journal"], ["hpcrun"])
    edges = measures.imports(trees)
    assert measures.circles(pair for pair, kind in edges.items() if kind == "at import") == []
    assert not measures.between(edges, {measures.BOTH}, {measures.DECIDES, measures.TRAINS})


def test_a_planted_import_is_found_in_each_measure() -> None:
    texts = {
        "hpcrun.job.a": "def f():\n    from hpcrun.train.b import g\n    return g.tag == 'ended'",
        "hpcrun.train.b": "from hpcrun.job import a\nfrom hpcrun.network import c\nx: Any = 1",
        "hpcrun.network.c": "if TYPE_CHECKING:\n    from hpcrun.train import b",
    }
    trees = {name: ast.parse(text) for name, text in texts.items()}
    edges = measures.imports(trees)
    assert measures.circles(edges) == ["hpcrun.job.a <-> hpcrun.train.b"]
    assert measures.circles([*edges][1:]) == []
    (found,) = measures.between(edges, {measures.DECIDES}, {measures.TRAINS})
    assert found == "hpcrun.job.a -> hpcrun.train.b (in a function)"
    assert len(measures.between(edges, {measures.TRAINS}, {"network"})) == 1
    assert measures.annotations(trees, {measures.TRAINS}) == ["hpcrun.train.b:3"]
    assert measures.text_comparisons(trees) == ["hpcrun.job.a:3: g.tag == 'ended'"]
