"""Frames, CSV and Parquet from results.h5."""

import csv
import sys
from pathlib import Path

import pytest

from hpcrun import load_results
from hpcrun.cli.main import guarded
from hpcrun.errors import ResultsError
from hpcrun.run.files import append_line
from tests.results.conftest import MakeRun


@pytest.fixture
def results(tmp_path: Path, make_run: MakeRun) -> Path:
    """Make a file of two runs; the second was restarted at step 20."""
    make_run("a-ü", [3.0, None], seed=1)
    run = make_run("b", [3.0, 2.0, 1.5], seed=2, config={"train": {"lr": 0.5}})
    append_line(run.metrics, {"step": 20, "time": 1.0, "restart": 1, "loss": 1.9, "note": "x,y"})
    words = ["aggregate", str(tmp_path / "runs"), "-o", str(tmp_path / "results.h5")]
    assert guarded([*words, "--processes", "0", "--csv", str(tmp_path / "tables")]) == 0
    return tmp_path / "results.h5"


def test_frames(results: Path) -> None:
    pytest.importorskip("pandas")
    found = load_results(results)
    runs = found.runs()
    assert runs["run"].tolist() == ["a-ü", "b"]
    assert runs["train.lr"].tolist() == [0.0003, 0.5]
    assert runs["seed"].tolist() == [1, 2]
    metrics = found.metrics(columns=["loss"])
    assert list(metrics.columns) == ["run", "step", "loss"]
    assert metrics[metrics.run == "b"].loss.tolist() == [3.0, 1.9]
    assert len(found.metrics(["b"], overwritten=True)) == 4
    assert found.metrics(["b"])["note"].tolist() == ["", "x,y"]
    assert found.events()["event"].tolist() == ["opened", "opened"]
    assert found.summary().set_index(["run", "metric"]).loc[("b", "loss"), "last"] == 1.9
    assert found.problems().empty
    assert found.result("b")["state"] == "finished"
    assert found.units["time"] == "s"


def test_without_pandas_the_error_names_the_remedy(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ResultsError, match=r"hpcrun\[tables\]"):
        load_results(results)


def test_csv(results: Path) -> None:
    folder = results.parent / "tables"
    tables = {}
    for name in ("runs", "metrics", "events"):
        with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as stream:
            tables[name] = list(csv.DictReader(stream))
    assert [row["run"] for row in tables["runs"]] == ["a-ü", "b"]
    assert [row["train.lr"] for row in tables["runs"]] == ["0.0003", "0.5"]
    assert [row["loss"] for row in tables["metrics"]] == ["3.0", "", "3.0", "2.0", "1.5", "1.9"]
    assert tables["metrics"][-1]["note"] == "x,y"
    assert tables["events"][0]["event"] == "opened"


def test_a_metric_called_run_does_not_replace_the_key(tmp_path: Path, make_run: MakeRun) -> None:
    append_line(make_run("a").metrics, {"step": 1, "run": 7.5})
    words = ["aggregate", str(tmp_path / "runs"), "-o", str(tmp_path / "results.h5")]
    assert guarded([*words, "--processes", "0", "--csv", str(tmp_path / "tables")]) == 0
    with (tmp_path / "tables" / "metrics.csv").open(encoding="utf-8", newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert row == {"run": "a", "step": "1", "metrics.run": "7.5"}
    pytest.importorskip("pandas")
    found = load_results(tmp_path / "results.h5").metrics(columns=["run"])
    assert found.to_dict("records") == [{"run": "a", "step": 1, "metrics.run": 7.5}]


def test_parquet(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = results.parent / "parquet"
    words = [
        "aggregate",
        str(results.parent / "runs"),
        "-o",
        str(results),
        "--parquet",
        str(folder),
    ]
    assert guarded(words) == 0
    assert str(folder / "metrics.parquet") in capsys.readouterr().out
    metrics = parquet.read_table(folder / "metrics.parquet")
    assert metrics["loss"].to_pylist() == [3.0, None, 3.0, 2.0, 1.5, 1.9]
    assert metrics["note"].to_pylist() == [None, None, "", "", "", "x,y"]
    assert metrics.schema.field("time").metadata == {b"unit": b"s"}
    assert parquet.read_table(folder / "runs.parquet")["run"].to_pylist() == ["a-ü", "b"]


def test_without_pyarrow_nothing_is_written(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = ["aggregate", str(results.parent / "runs"), "-o", str(results), "--fresh"]
    before = results.stat().st_ino
    assert guarded([*words, "--parquet", str(results.parent / "p")]) == 2
    assert "hpcrun[tables]" in capsys.readouterr().err
    assert results.stat().st_ino == before
