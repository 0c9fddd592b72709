"""Run directories become one results.h5."""

import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcrun.cli.main import guarded
from hpcrun.errors import ResultsError
from hpcrun.results.collect.aggregate import RunSource, aggregate, each
from hpcrun.results.collect.run_reader import find_runs
from hpcrun.results.store import ResultsFile
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunError
from hpcrun.run.files import append_line
from hpcrun.run.lock_file import LockFile
from tests.results.conftest import MakeRun, collect
from tests.support.journal import record_event


def same(one: Any, other: Any) -> bool:
    """Compare records; NaN is equal to NaN."""
    return one.dtype.names == other.dtype.names and repr(one.tolist()) == repr(other.tolist())


def test_a_run_is_in_the_file_with_everything(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run("größe-実験", [3.0, 2.0, None, 2.5], seed=4)
    record_event(run, "ended", attempt=Attempt("7", 0), cause="finished", step=40, extra="é")
    summary = collect(tmp_path)
    assert (summary.read, summary.rows, summary.problems) == (1, 4, [])
    with h5py.File(tmp_path / "results.h5") as file:
        group = file["run/größe-実験"]
        metrics = group["metrics"]
        assert metrics.attrs["columns"].tolist() == ["step", "time", "restart", "loss"]
        assert metrics["step"].dtype == np.int64
        assert metrics["loss"][:2].tolist() == [3.0, 2.0]
        assert np.isnan(metrics["loss"][2])
        assert json.loads(group["config"].asstr()[()])["seed"] == 4
        assert json.loads(group["identity"].asstr()[()])["executor"] == "local"
        assert json.loads(group["result"].asstr()[()])["state"] == "finished"
        events = group["events"]
        assert events["event"].asstr()[:].tolist() == ["opened", "ended"]
        assert events["step"][:].tolist() == [-1, 40]
        assert json.loads(events["fields"].asstr()[1]) == {"extra": "é"}
        cells = [file["columns"][name].asstr()[:] for name in ("table", "column", "unit", "source")]
        described = {row[:2]: row[2:] for row in zip(*cells, strict=True)}
        assert described["metrics", "time"] == ("s", "metrics.jsonl")
        assert file.attrs["layout_version"] == 4
        runs = file["runs"]
        assert runs["run"].asstr()[:].tolist() == ["größe-実験"]
        assert (runs["state"].asstr()[0], runs["seed"][0], runs["step"][0]) == ("finished", 4, 40)
        summary_of = {name: column[0] for name, column in file["summary"].items()}
        assert summary_of["metric"] == b"loss"
        assert [summary_of[name] for name in ("rows", "nonfinite", "last", "last_step")] == [
            *(4, 1),
            *(2.5, 40),
        ]
        assert [summary_of[name] for name in ("min", "min_step", "max", "max_step")] == [
            *(2.0, 20),
            *(3.0, 10),
        ]


def test_only_what_changed_is_read_again(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [make_run(f"r{n}", [1.0, 2.0]) for n in range(5)]
    assert collect(tmp_path).read == 5
    before = (tmp_path / "results.h5").stat()
    again = collect(tmp_path)
    assert (again.read, again.unchanged, again.written) == (0, 5, False)
    assert (tmp_path / "results.h5").stat().st_ino == before.st_ino
    # Another file of equal size and time; its changed line has a wrong checksum.
    found = runs[1].metrics.stat()
    other = tmp_path / "other"
    other.write_bytes(runs[1].metrics.read_bytes().replace(b'"loss":1.0', b'"loss":9.0'))
    os.utime(other, ns=(found.st_atime_ns, found.st_mtime_ns))
    other.replace(runs[1].metrics)
    append_line(runs[2].metrics, {"step": 30, "time": 5.0, "restart": 0, "loss": 0.5, "new": "x"})
    runs[3].result.unlink()
    changed = collect(tmp_path)
    assert (changed.read, changed.unchanged, changed.rows) == (3, 2, 10)
    assert changed.states == {"finished": 4, "unfinished": 1}
    with ResultsFile(tmp_path / "results.h5") as store:
        metrics = store.metrics("r2")
        assert metrics is not None
        assert metrics["new"].tolist() == [b"", b"", b"x"]
        assert store.document("r3", "result") == {}
        assert len(store.table("runs")) == 5
        assert len(store.table("files")) == 25


def test_an_update_is_the_same_as_a_new_file(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [make_run(f"r{n}", [1.0 * n, 2.0]) for n in range(6)]
    collect(tmp_path)
    append_line(runs[1].metrics, {"step": 30, "note": "long text " * 9})
    make_run("new", [5.0])
    collect(tmp_path)
    collect(tmp_path, "fresh.h5")
    with ResultsFile(tmp_path / "results.h5") as one, ResultsFile(tmp_path / "fresh.h5") as other:
        for name in ("runs", "summary", "files", "problems"):
            assert same(one.table(name), other.table(name))
        assert one.units() == other.units()
        for key in one.keys():  # noqa: SIM118
            assert same(one.metrics(key), other.metrics(key))
            assert same(one.part(key, "events"), other.part(key, "events"))
            assert one.document(key, "config") == other.document(key, "config")


def test_equal_names_are_two_runs_and_links_are_none(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("same", [1.0], folder="runs/a")
    other = make_run("same", [1.0, 2.0], folder="runs/b")
    (tmp_path / "runs" / "link").symlink_to(other.path)
    collect(tmp_path)
    collect(tmp_path, fresh=True)
    with ResultsFile(tmp_path / "results.h5") as store:
        assert store.keys() == ["same", "same~2"]


def test_runs_that_are_gone_stay_until_a_fresh_start(tmp_path: Path, make_run: MakeRun) -> None:
    import shutil

    gone = make_run("gone", [1.0])
    make_run("here", [1.0])
    collect(tmp_path)
    shutil.rmtree(gone.path)
    found = collect(tmp_path)
    assert (found.kept, found.written) == ([str(gone.path)], False)
    assert collect(tmp_path, fresh=True).states == {"finished": 1}


def test_one_writer_at_a_time(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("r", [1.0])
    lock = LockFile(tmp_path / ".results.h5.lock", "busy")
    with lock, pytest.raises(RunError, match=r"another `hpcrun aggregate` is writing it"):
        collect(tmp_path)
    assert not (tmp_path / "results.h5").exists()
    assert collect(tmp_path).read == 1


def test_files_of_others_are_not_replaced(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("r", [1.0])
    (tmp_path / "a.h5").write_text("a thesis")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["data"] = 1
    for name in ("a.h5", "b.h5"):
        before = (tmp_path / name).read_bytes()
        for fresh in (False, True):
            with pytest.raises(ResultsError, match="choose another name"):
                collect(tmp_path, name, fresh=fresh)
        assert (tmp_path / name).read_bytes() == before


def test_another_layout_is_refused(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("r", [1.0])
    with h5py.File(tmp_path / "results.h5", "w") as file:
        file.attrs.update({"format": "hpcrun results", "layout_version": 1})
    with pytest.raises(ResultsError, match=r"layout 1, .* move it away"):
        collect(tmp_path)


def test_processes_read_the_same(tmp_path: Path, make_run: MakeRun) -> None:
    for number in range(9):
        make_run(f"r{number}", [float(number)])
    runs = find_runs([str(tmp_path / "runs")], tmp_path)
    aggregate(RunSource(runs), tmp_path / "many.h5", processes=2)
    collect(tmp_path, "one.h5")
    with ResultsFile(tmp_path / "many.h5") as many, ResultsFile(tmp_path / "one.h5") as one:
        np.testing.assert_array_equal(many.table("runs"), one.table("runs"))
        np.testing.assert_array_equal(many.metrics("r7"), one.metrics("r7"))


def refuse(job: str) -> str:
    """Fail like a reader without tensorboard; a process imports this function."""
    raise ResultsError(f"{job}: needs tensorboard")


@pytest.mark.parametrize("processes", [0, 2])
def test_the_refusal_of_a_reader_reaches_the_caller(
    capfd: pytest.CaptureFixture[str], processes: int
) -> None:
    with pytest.raises(ResultsError, match=r"^run: needs tensorboard$"):
        list(each(refuse, ["run"], processes))
    assert capfd.readouterr().err == ""


def test_the_command_prints_a_summary(
    tmp_path: Path,
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("a", [1.0, 2.0])
    torn = make_run("b", [1.0], state="failed")
    with torn.metrics.open("ab") as stream:
        stream.write(b'{"st')
    assert guarded(["aggregate", "runs", "-o", "out.h5", "--processes", "0"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "out.h5: 2 runs (1 failed, 1 finished), 3 rows of metrics",
        "  read 2, unchanged 0",
        "  1 problem; the rest of these runs is in the file:",
        f"    {torn.path}/metrics.jsonl: torn last line (4 bytes)",
    ]
    assert guarded(["aggregate", "a", "-o", "out.h5"]) == 0
    assert "kept 1 run of earlier calls" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere"], "no such directory"),
        (["empty"], "contains no run directories"),
        (["runs", "-o", "empty"], "is a directory"),
        (["runs", "-o", "no/such/x.h5"], "no such directory"),
        (["runs", "--processes", "-1"], "should be 0 to 64"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("a", [1.0])
    (tmp_path / "empty").mkdir()
    assert guarded(["aggregate", *words]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "results.h5").exists()
