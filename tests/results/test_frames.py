"""Frames from results.h5."""

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
    assert guarded([*words, "--processes", "0"]) == 0
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


def test_a_metric_called_run_does_not_replace_the_key(tmp_path: Path, make_run: MakeRun) -> None:
    append_line(make_run("a").metrics, {"step": 1, "run": 7.5})
    words = ["aggregate", str(tmp_path / "runs"), "-o", str(tmp_path / "results.h5")]
    assert guarded([*words, "--processes", "0"]) == 0
    pytest.importorskip("pandas")
    found = load_results(tmp_path / "results.h5").metrics(columns=["run"])
    assert found.to_dict("records") == [{"run": "a", "step": 1, "metrics.run": 7.5}]
