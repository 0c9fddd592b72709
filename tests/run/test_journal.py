"""The journal: each kind is written and read, and logs of other versions are understood."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpcrun
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import append_line, read_lines
from hpcrun.run.goodput import goodput
from hpcrun.run.journal import events as kinds
from hpcrun.run.journal.events import KINDS, Ended, Opened, Started, Unknown, to_event, to_line
from hpcrun.run.journal.journal import Journal

# A local run with a crash, a preemption, a cancellation and a resume; `host` and paths are changed.
BEFORE = Path(__file__).with_name("journal_of_version_before.jsonl")
JOB = "1795920188"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with the journal of the version before."""
    found = RunDirectory(tmp_path)
    found.events.write_bytes(BEFORE.read_bytes())
    return found


def test_the_journal_of_the_version_before_is_read(run: RunDirectory) -> None:
    state = Journal(run).read()
    ends = [(one.attempt.owner, str(one.cause.value), one.committed) for one in state.attempts]  # type: ignore[union-attr]
    assert ends == [
        (f"{JOB}-0", "crash", 20),
        (f"{JOB}-0.1", "preemption", 43),
        (f"{JOB}-1", "cancelled", 63),
        ("1795920274-0", "finished", 160),
    ]
    assert (state.job, state.committed) == (("local", "1795920274"), 160)
    assert (state.restarts, state.restarts_in_place) == ({"crash": 1, "preemption": 1}, 1)
    assert state.asked_to_yield(Attempt(JOB, 0, 1))
    assert goodput(state, 0.0).ettr == pytest.approx(0.3887, abs=1e-4)


def test_the_version_before_can_read_this_journal(run: RunDirectory) -> None:
    for line in read_lines(run.events):
        event = to_event(line)
        # It took a submission without a number for the first start of the job.
        assert event is not None
        assert to_line(event) == {**line, "restart": line.get("restart", 0)}


def test_kinds_and_fields_of_a_newer_version_are_kept(run: RunDirectory) -> None:
    before = Journal(run).read()
    newer = {"time": 1.0, "event": "moved", "job": "9", "restart": 3, "to": ["n1"]}
    append_line(run.events, newer)
    state = Journal(run).read()
    assert isinstance(state.events[-1], Unknown)
    assert to_line(state.events[-1]) == newer
    facts = (state.attempts, state.job, state.owner, state.committed, goodput(state, 0.0))
    old = (before.attempts, before.job, before.owner, before.committed, goodput(before, 0.0))
    assert facts == old


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ({"event": "opened", "nodes": "two", "rack": 3}, Opened(time=0.0).nodes),
        ({"event": "ended", "reason": 7, "cause": "crash"}, None),
        ({"event": "started", "snapshot": [1]}, None),
    ],
)
def test_a_field_of_another_type_counts_as_missing(line: dict[str, Any], value: None) -> None:
    event = to_event({"time": 2.0, **line})
    assert isinstance(event, Opened | Ended | Started)
    named = {"opened": "nodes", "ended": "reason", "started": "snapshot"}[event.tag]
    assert getattr(event, named) is value
    assert to_line(event) == {"time": 2.0, **line}


@pytest.mark.parametrize(
    "line",
    [
        {"event": "saved", "time": "late"},
        {"event": "saved", "step": "ten"},
        {"event": "ended", "cause": 3},
        {"event": "opened", "job": "1", "restart": "x"},
        {"event": "opened", "job": "1", "restart": float("inf")},
        {"time": 1.0},
    ],
)
def test_a_line_with_a_damaged_envelope_is_skipped(line: dict[str, Any]) -> None:
    assert to_event(line) is None


def test_an_event_has_only_its_own_fields_and_keeps_them() -> None:
    with pytest.raises(TypeError, match="Ended has no field hosts"):
        Ended(hosts=["n1"])  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="an event does not change"):
        Ended().cause = "crash"  # type: ignore[misc]


def modules() -> Iterator[ast.Module]:
    package = Path(str(hpcrun.__file__)).parent
    for path in sorted(package.rglob("*.py")):
        if path != Path(str(kinds.__file__)):
            yield ast.parse(path.read_text())


def test_every_kind_is_written_and_read() -> None:
    written: set[str] = set()
    read: set[str] = set()
    for module in modules():
        names = {
            one.asname or one.name: one.name
            for node in ast.walk(module)
            if isinstance(node, ast.ImportFrom) and node.module == kinds.__name__
            for one in node.names
        }
        # A call makes an event, except in a pattern of `match`.
        patterns = {id(node.cls) for node in ast.walk(module) if isinstance(node, ast.MatchClass)}
        calls = {id(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)}
        for node in ast.walk(module):
            if isinstance(node, ast.Name) and node.id in names:
                made = id(node) in calls - patterns
                (written if made else read).add(names[node.id])
    every = {kind.__name__ for kind in KINDS.values()}
    assert every - written == set(), "kinds that no code writes"
    assert every - read == set(), "kinds that no code reads"


def test_no_code_compares_a_kind_as_text() -> None:
    compared = [ast.unparse(node) for one in modules() for node in ast.walk(one) if is_text(node)]
    assert compared == []


def is_text(node: ast.AST) -> bool:
    """Return True for a comparison with the tag of an event; nodes of YAML have a tag too."""
    if not isinstance(node, ast.Compare):
        return False
    inner = [*ast.walk(node)]
    by_tag = any(isinstance(one, ast.Attribute) and one.attr == "tag" for one in inner)
    words = any(isinstance(one, ast.Constant) and one.value in [*KINDS] for one in inner)
    text = ast.unparse(node)
    return (by_tag and not text.startswith("node.tag")) or (words and "event" in text)
