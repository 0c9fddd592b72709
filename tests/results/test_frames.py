"""Frames, CSV and Parquet from results.h5."""

import csv
import json
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
    assert guarded([*words, "--processes", "0", "--format", "csv"]) == 0
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


def test_keys_of_the_config_with_names_of_columns_get_others(
    tmp_path: Path, make_run: MakeRun
) -> None:
    pytest.importorskip("pandas")
    make_run("a").config.write_text("run: 1\nrun.config: 2\nstate: 3\n")
    words = ["aggregate", str(tmp_path / "runs"), "-o", str(tmp_path / "r.h5"), "--processes", "0"]
    assert guarded(words) == 0
    (row,) = load_results(tmp_path / "r.h5").runs().to_dict("records")
    assert (row["run"], row["run.config"], row["run.config.config"]) == ("a", 2, 1)
    assert (row["state"], row["state.config"]) == ("finished", 3)


def test_without_pandas_the_error_names_the_remedy(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ResultsError, match=r"hpcrun\[tables\]"):
        load_results(results)


def test_csv(results: Path) -> None:
    folder = results.parent / "results-csv"
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
    assert guarded([*words, "--processes", "0", "--format", "csv"]) == 0
    with (tmp_path / "results-csv" / "metrics.csv").open(encoding="utf-8", newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert row == {"run": "a", "step": "1", "metrics.run": "7.5", "sweep": "none"}
    pytest.importorskip("pandas")
    found = load_results(tmp_path / "results.h5").metrics(columns=["run"])
    assert found.to_dict("records") == [{"run": "a", "step": 1, "metrics.run": 7.5}]


def test_parquet_has_a_folder_for_each_sweep(
    results: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    import pandas as pd
    from pyarrow import parquet

    run = make_run("000", [4.0], folder="runs/größe 1")
    append_line(run.metrics, {"step": 20, "loss": 0.1, "sweep": 7, "note": 3, "more": True})
    (run.path / "run.json").write_text(
        json.dumps({"sweep": {"values": {"seed": 0}, "command": []}})
    )
    folder = results.parent / "results-parquet"
    words = ["aggregate", str(results.parent / "runs"), "-o", str(results), "--format", "parquet"]
    for _ in range(2):
        assert guarded(words) == 0
        assert f"tables: {folder}" in capsys.readouterr().out
    metrics = pd.read_parquet(folder / "metrics")
    assert metrics["loss"].tolist()[-4:] == [3.0, 2.0, 1.5, 1.9]
    assert metrics["sweep"].tolist() == ["größe 1"] * 2 + ["none"] * 6
    assert metrics["loss"].dtype == float
    assert metrics["note"].dropna().tolist() == ["3.0", "", "", "", "x,y"]
    own = pd.read_parquet(folder / "metrics", filters=[("sweep", "==", "größe 1")])
    assert (own["loss"].tolist(), own["metrics.sweep"].tolist()[1]) == ([4.0, 0.1], 7)
    (file,) = (folder / "metrics" / "sweep=none").iterdir()
    schema = parquet.read_schema(file)
    assert (schema.field("note").type, schema.field("step").type) == ("string", "int64")
    columns = pd.read_parquet(folder / "columns.parquet").set_index(["table", "column"])
    assert columns.loc[("metrics", "time"), "unit"] == "s"
    assert pd.read_parquet(folder / "runs.parquet")["sweep"].tolist() == ["größe 1", "", ""]
    assert [path.name for path in results.parent.glob(".results*")] == []
    (folder / "thesis.tex").write_text("mine")
    assert guarded(words) == 2
    assert "is not a folder of tables by hpcrun; move it away" in capsys.readouterr().err
    assert (folder / "thesis.tex").read_text() == "mine"


def test_without_pyarrow_nothing_is_written(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = ["aggregate", str(results.parent / "runs"), "-o", str(results), "--fresh"]
    before = results.stat().st_ino
    assert guarded([*words, "--format", "parquet"]) == 2
    assert "hpcrun[tables]" in capsys.readouterr().err
    assert results.stat().st_ino == before
