"""Results of other programs, by a mapping file."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpcrun.cli.main import guarded
from hpcrun.results.store import ResultsFile

MAPPING = """
metrics: [progress.csv, "*.jsonl", log.json]
config: args.yaml
result: final.json
step: global_step
rename: {train/loss: loss}
units: {loss: nats}
"""


def mapped(folder: Path, text: str, *words: str) -> int:
    (folder / "mapping.yaml").write_text(text)
    out = str(folder / "results.h5")
    mapping = str(folder / "mapping.yaml")
    return guarded(
        ["aggregate", str(folder / "runs"), "--map", mapping, "-o", out, "--processes", "0", *words]
    )


def metrics(folder: Path, run: str = "a") -> Any:
    """Return the metrics of a run in the file."""
    with ResultsFile(folder / "results.h5") as store:
        found = store.metrics(run)
    assert found is not None
    return found


def write(folder: Path, run: str, **files: Any) -> Path:
    path = folder / "runs" / run
    path.mkdir(parents=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("_dot_", ".")).write_text(text)
    return path


def test_csv_json_and_jsonl_are_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = ({"args_dot_yaml": f"seed: {seed}\nlr: 3e-4\n"} for seed in (1, 2, 3))
    rows = "global_step,train/loss,note\n1,2.5,a\n2,,b\n3,1.5,c\n"
    write(tmp_path, "a", progress_dot_csv=rows, final_dot_json={"x": 1}, **a)
    lines = '{"global_step":1,"train/loss":2}\n{"global_step":2,"train/loss":1}\n'
    write(tmp_path, "b", m_dot_jsonl=lines, final_dot_json={"x": 2}, **b)
    columns = {"global_step": [1, 2], "train/loss": [4.0, 3.0]}
    write(tmp_path, "c", log_dot_json=columns, **c)
    (tmp_path / "runs" / "no-run").mkdir()
    assert mapped(tmp_path, MAPPING) == 0
    told = capsys.readouterr().out
    assert "3 runs (2 finished, 1 unfinished), 7 rows" in told
    assert "problem" not in told
    found = metrics(tmp_path)
    assert found.dtype.names == ("step", "loss", "note")
    assert found["step"].tolist() == [1, 2, 3]
    assert found["loss"].tolist()[::2] == [2.5, 1.5]
    with ResultsFile(tmp_path / "results.h5") as store:
        assert store.table("runs")["seed"].tolist() == [1, 2, 3]
        assert store.units()["loss"] == "nats"
    assert mapped(tmp_path, MAPPING) == 0
    assert "read 0, unchanged 3" in capsys.readouterr().out
    assert guarded(["compare", str(tmp_path / "results.h5")]) == 0
    assert "c (seed 3): unfinished" in capsys.readouterr().out


def test_a_new_file_of_metrics_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path, "a", one_dot_jsonl='{"step":1,"loss":1}\n')
    assert mapped(tmp_path, "metrics: '*.jsonl'") == 0
    (run / "two.jsonl").write_text('{"step":2,"loss":2}\n')
    assert mapped(tmp_path, "metrics: '*.jsonl'") == 0
    assert "read 1, unchanged 0" in capsys.readouterr().out
    (run / "one.jsonl").unlink()
    assert mapped(tmp_path, "metrics: '*.jsonl'") == 0
    assert "1 row" in capsys.readouterr().out


def test_a_mapping_takes_the_names_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a", m_dot_csv="step,loss\n1,2\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "map.yaml").write_text("metrics: m.csv")
    for named in ("a", "runs/a", "runs"):
        assert (
            guarded(["aggregate", named, "--map", "map.yaml", "--processes", "0", "--fresh"]) == 0
        )
        assert "1 run (1 finished), 1 row" in capsys.readouterr().out
    assert guarded(["aggregate", "b", "--map", "map.yaml"]) == 2
    assert "b: no such directory, neither here nor in " in capsys.readouterr().err


def test_logs_of_training_and_validation_do_not_overwrite_each_other(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        train_dot_csv="step,restart,loss\n1,0,4\n2,0,3\n3,0,9\n3,1,2\n",
        val_dot_csv="step,restart,accuracy\n1,0,0.1\n3,0,0.3\n",
    )
    assert mapped(tmp_path, "metrics: [train.csv, val.csv]") == 0
    found = metrics(tmp_path)
    assert found.dtype.names == ("step", "loss", "accuracy")
    assert found["step"].tolist() == [1, 1, 2, 3, 3]
    assert [value for value in found["loss"].tolist() if value == value] == [4, 3, 2]
    with ResultsFile(tmp_path / "results.h5") as store:
        counts = {row["metric"]: (row["rows"], row["max"]) for row in store.table("summary")}
        assert counts == {b"loss": (3, 4.0), b"accuracy": (2, 0.3)}


def test_files_with_the_same_columns_are_parts_of_one_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a", p9_dot_csv="step,loss\n1,4\n2,9\n", p10_dot_csv="step,loss\n2,3\n3,2\n")
    b = write(tmp_path, "b", p1_dot_csv="step,loss\n1,4\n2,8\n3,9\n", p2_dot_csv="step,loss\n2,3\n")
    assert mapped(tmp_path, "metrics: 'p*.csv'") == 2
    told = capsys.readouterr().err
    assert told.startswith(f"hpcrun: {b}/p2.csv: goes back to an earlier step")
    assert told.count("\n") == 1
    assert not (tmp_path / "results.h5").exists()
    assert mapped(tmp_path, "metrics: 'p*.csv'\nrows: log") == 0
    assert metrics(tmp_path, "a")["step"].tolist() == [1, 2, 2, 3]
    assert metrics(tmp_path, "b")["step"].tolist() == [1, 2, 3, 2]
    with ResultsFile(tmp_path / "results.h5") as store:
        summary = {row["run"]: row for row in store.table("summary")}
        assert (summary[b"b"]["rows"], summary[b"b"]["max"], summary[b"b"]["last"]) == (2, 4, 3)


def test_a_log_without_validation_so_far_is_a_part(tmp_path: Path) -> None:
    """Lightning begins a folder with each start, and its CSV has the columns of the values so far."""
    first = "epoch,loss,step,accuracy\n0,4.0,9,\n0,,9,0.5\n1,3.0,19,\n"
    run = write(tmp_path, "a")
    for version, text in ((2, first), (10, "epoch,loss,step\n1,2.0,19\n1,1.0,29\n")):
        (run / "logs" / f"version_{version}").mkdir(parents=True)
        (run / "logs" / f"version_{version}" / "metrics.csv").write_text(text)
    assert mapped(tmp_path, "metrics: logs/version_*/metrics.csv\nrows: log") == 0
    assert metrics(tmp_path)["step"].tolist() == [9, 9, 19, 19, 29]
    with ResultsFile(tmp_path / "results.h5") as store:
        counts = {row["metric"]: (row["rows"], row["last"]) for row in store.table("summary")}
    assert counts[b"accuracy"] == (1, 0.5)


def test_torn_and_damaged_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "a", progress_dot_csv="step,loss\n1,2\n2\n3,0.1")
    write(tmp_path, "b", log_dot_json="{{{")
    write(tmp_path, "c", x_dot_jsonl='{"step":1}\nnothing\n{"st')
    assert mapped(tmp_path, 'metrics: [progress.csv, log.json, "*.jsonl"]') == 0
    told = capsys.readouterr().out
    assert "a/progress.csv: torn last line (5 bytes)" in told
    assert "a/progress.csv: 1 damaged line" in told
    assert "b/log.json: cannot be parsed" in told
    assert "c/x.jsonl: torn last line (4 bytes)" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("metric: x.csv", "metrics: field required; the keys are runs, metrics"),
        ("metrics: thesis.pdf", "thesis.pdf: has a format that hpcrun does not read"),
        ("metrics: none.csv", "has a file none.csv"),
        ("metrics: /etc/passwd", "should be a path below"),
        ("metrics: [", "mapping.yaml:1"),
        ("", "should be keys and values"),
    ],
)
def test_a_bad_mapping_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    write(tmp_path, "a", progress_dot_csv="step,loss\n1,2\n", thesis_dot_pdf="%PDF-1.7")
    assert mapped(tmp_path, text) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
