"""results.h5 in the forms of h5py's users, and a file of the layout before."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pytest

import hpcrun
from hpcrun.cli.main import guarded
from hpcrun.results.store import ResultsFile
from hpcrun.run.files import append_line
from tests.results.conftest import MakeRun, collect

OLDER = Path(__file__).with_name("layout-3.h5")
"""Four runs of two configs and two seeds, written by the last commit with the layout 3."""


def frame(group: h5py.Group) -> pd.DataFrame:
    """Return a table as plain h5py and pandas read it."""
    return pd.DataFrame(
        {
            name: column.asstr()[...] if h5py.check_string_dtype(column.dtype) else column[...]
            for name, column in group.items()
        }
    )


def test_h5py_shows_texts_units_and_configs(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("größe", [3.0, 2.0], config={"train": {"lr": 0.01}, "job": {"nodes": 2}})
    make_run("b", [float(n) for n in range(2000)], seed=3)
    other = make_run("odd", [1.0])
    append_line(other.metrics, {"step": 20, "train/acc": 0.5, "kind": "läuft"})
    collect(tmp_path)
    with h5py.File(tmp_path / "results.h5") as file:
        runs = frame(file["runs"])
        assert runs["run"].tolist() == ["b", "größe", "odd"]
        assert runs["state"].tolist() == ["finished"] * 3
        assert file["runs/created"].attrs["units"] == "s"
        assert "units" not in file["runs/seed"].attrs
        metrics = file["run/odd/metrics"]
        assert metrics["time"].attrs["units"] == "s"
        assert metrics["kind"].asstr()[...].tolist() == ["", "läuft"]
        assert metrics.attrs["columns"].tolist()[-2:] == ["train/acc", "kind"]
        assert np.isnan(metrics["train__acc"][0])
        kind = h5py.check_string_dtype(metrics["kind"].dtype)
        assert (kind.encoding, kind.length) == ("utf-8", None)
        long = file["run/b/metrics/loss"]
        assert (long.compression, long.shuffle, long.fletcher32) == ("gzip", True, True)
        assert long.id.get_storage_size() < long.nbytes
        assert file["run/odd/metrics/loss"].compression is None
        # A row for each run, in the order of the table runs.
        config = file["config"]
        assert config["run"].asstr()[...].tolist() == runs["run"].tolist()
        assert config["train.lr"][1] == 0.01
        assert config["seed"][...].tolist() == [3, 0, 0]
        assert config["job.nodes"][...].tolist()[1] == 2
        assert config["task"].asstr()[0] == json.loads(file["run/b/config"].asstr()[()])["task"]
    # A later call keeps runs unchanged, and their configs.
    make_run("c", [1.0], seed=7)
    assert collect(tmp_path).unchanged == 3
    with h5py.File(tmp_path / "results.h5") as file:
        assert frame(file["config"])["seed"].tolist() == [3, 7, 0, 0]
        assert frame(file["run/größe/metrics"])["loss"].tolist() == [3.0, 2.0]


def test_a_file_of_the_layout_before_is_read(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    older = tmp_path / "results.h5"
    shutil.copy(OLDER, older)
    results = hpcrun.load_results(older)
    runs = results.runs()
    assert runs["run"].tolist() == ["b-0", "b-1", "größe-0", "größe-1"]
    assert runs["train.lr"].tolist() == [0.003, 0.003, 0.001, 0.001]
    metrics = results.metrics(["größe-0"], ["loss", "data/kind"])
    assert metrics["loss"].tolist() == pytest.approx([1.0, 0.5, 1 / 3])
    assert metrics["data/kind"].tolist() == ["train"] * 3
    assert results.units["step_time"] == "s"
    assert results.result("b-1")["state"] == "finished"
    capsys.readouterr()
    assert guarded(["compare", str(older), "--metric", "loss", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert guarded(["report", str(older), "-o", str(tmp_path / "page.html")]) == 0
    assert "größe-0" in (tmp_path / "page.html").read_text(encoding="utf-8")
    # An aggregation writes the new layout, with the runs of the file before.
    before = results.metrics(overwritten=True)
    make_run("new", [1.0])
    assert collect(tmp_path).read == 1
    with ResultsFile(older) as store:
        assert store.layout == 4
    again = hpcrun.load_results(older)
    pd.testing.assert_frame_equal(
        again.metrics([*runs["run"]], overwritten=True)[before.columns], before
    )
    assert again.runs()["train.lr"].tolist()[:4] == runs["train.lr"].tolist()
    with h5py.File(older) as file:
        assert frame(file["run/größe-0/metrics"])["data__kind"].tolist() == ["train"] * 3
        assert frame(file["config"])["run"].tolist()[:2] == ["b-0", "b-1"]
    capsys.readouterr()
    assert guarded(["compare", str(older), "--metric", "loss", "--json", "--by", "train.lr"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert compared.keys() == found.keys()
