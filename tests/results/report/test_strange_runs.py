"""Reports of strange runs: none keeps the page from being written, and each is there."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcrun.cli.main import guarded
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import append_line, write_json

from .conftest import START, MakeRun, add_event, read
from .page import Page

# A letter without a glyph, an attribute, a color of the style, a reversal, mathematics.
NAMES = ("実験 🚀", 'a id="b #0072b2 <b>', "x\u202ey", "_$x^2$")


def metrics(run: RunDirectory, rows: Sequence[dict[str, Any]]) -> None:
    """Replace the metrics of a run."""
    run.metrics.unlink()
    for row in rows:
        append_line(run.metrics, row)


@pytest.mark.filterwarnings("error")
def test_strange_runs_are_all_in_the_report(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, name in enumerate(NAMES):
        make_run(name, seed=seed)
    steps = range(1, 5)
    metrics(make_run("text", seed=10), [{"step": f"s{at}", "loss": 1 / at} for at in steps])
    metrics(make_run("nan", seed=11), [{"step": at, "loss": float("nan")} for at in steps])
    metrics(make_run("huge", seed=12), [{"step": at, "loss": 1e308 / at} for at in steps])
    odd = make_run("odd", seed=13, config={"job": {"cpu": True, "mem": "0"}})
    write_json(odd.record, {"created": 1e20, "executor": "local"})
    saving = make_run("saving", seed=14)
    for at in range(2000):
        add_event(saving, "saved", 92 + at, restart=1, step=40 + at, seconds=0.1)
    page = tmp_path / "r.html"
    assert guarded(["report", str(tmp_path / "runs"), "-o", str(page)]) == 0
    found = Page(page)
    for run in read(tmp_path / "runs"):
        name = run.key.replace("\u202e", r"\u202e")
        assert name in found.words
        assert found.run(name)["counts"]
    assert len(found.source) < 5_200_000
    assert "loss is not finite at step 4" in found.words
    assert found.run("nan")["values"]["loss"] is None
    assert found.run("huge")["values"]["loss"] == 2.5e307
    (tmp_path / "one").mkdir()
    (tmp_path / "runs" / NAMES[0]).rename(tmp_path / "one" / "a")
    assert guarded(["report", str(tmp_path / "one"), "-o", str(page)]) == 0
    assert "Report of 1 run" in Page(page).words


def test_the_page_has_all_metrics_of_another_script(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    rows = [{"step": at, "精度": at, "速度_per_second": 2.0 * at} for at in range(1, 5)]
    metrics(run, [row | {"音_per_second": 1.0} for row in rows])
    metrics(make_run("b"), [row | {"loss": 3.0} for row in rows])
    page = tmp_path / "r.html"
    assert guarded(["report", str(tmp_path / "runs"), "-o", str(page), "--metric", "精度"]) == 0
    assert Page(page).data["metrics"][0] == "精度"
    assert {"速度_per_second", "音_per_second", "loss"} < set(Page(page).data["metrics"])


@pytest.mark.parametrize(("at", "value"), [("last", "4"), ("best", "1"), ("2", "2")])
def test_all_runs_have_the_value_at_the_same_moment(
    make_run: MakeRun, tmp_path: Path, at: str, value: str
) -> None:
    rows = [{"step": step, "loss": step} for step in range(1, 5)]
    metrics(make_run("counts"), rows)
    metrics(make_run("failed", state="failed"), rows)
    page = tmp_path / "r.html"
    assert guarded(["report", str(tmp_path / "runs"), "-o", str(page), "--at", at]) == 0
    found = Page(page)
    assert [run["values"]["loss"] for run in found.data["runs"]] == [float(value)] * 2
    assert (
        re.findall(r'<td class="n" data-v="([^"]*)">[^<]*</td><td>(?:yes|failed)', found.source)
        == [f"{value}.0"] * 2
    )


def test_an_attempt_that_died_ends_at_its_last_sign(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a", state=None)
    lost = {"cause": "node-failure", "restart_allowed": False, "last_seen": START + 70}
    add_event(run, "ended", 9000, restart=1, **lost)
    (found,) = read(tmp_path / "runs")
    assert found.goodput.wall == 70
