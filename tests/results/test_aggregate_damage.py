"""Damaged and strange files of a run cost no other run its place in results.h5."""

from pathlib import Path

import numpy as np
import pytest

from hpcrun.results.store import ResultsFile
from hpcrun.run.directory import create
from hpcrun.run.files import append_line, write_hashed
from tests.results.conftest import MakeRun, collect


def test_torn_lines_wait_and_are_named_until_they_are_whole(
    tmp_path: Path, make_run: MakeRun
) -> None:
    run = make_run("r", [1.0, 2.0])
    with run.metrics.open("ab") as stream:
        stream.write(b'{"step":30,"lo')
    for _ in range(2):
        found = collect(tmp_path)
        assert found.rows == 2
        assert found.problems == [(str(run.path), "metrics.jsonl", "torn last line (14 bytes)")]
    with run.metrics.open("ab") as stream:
        stream.write(b'ss":0.5}\n')
    found = collect(tmp_path)
    assert (found.rows, found.problems) == (3, [])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("config.yaml", "is no config"),
        ("run.json", "is no JSON object"),
        ("result.json", "is no JSON object"),
        ("metrics.jsonl", "damaged line"),
        ("events.jsonl", "damaged line"),
    ],
)
def test_a_corrupt_file_is_named_and_the_rest_is_kept(
    tmp_path: Path, make_run: MakeRun, name: str, what: str
) -> None:
    run = make_run("bad", [1.0, 2.0])
    make_run("good", [3.0])
    (run.path / name).write_bytes(b"\x00\xff\x93{]\n" * 50)
    found = collect(tmp_path)
    assert [(path, file) for path, file, _ in found.problems] == [(str(run.path), name)]
    assert what in found.problems[0][2]
    assert found.rows == (1 if name == "metrics.jsonl" else 3)
    assert sum(found.states.values()) == 2


def test_a_flipped_bit_in_a_value_is_named(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run("r", [1.0, 2.0, 3.0])
    run.metrics.unlink()
    for step, loss in enumerate([0.5, 0.25, 0.125]):
        append_line(run.metrics, {"step": step, "loss": loss})
    write_hashed(run.result, {"state": "finished", "loss": 0.125})
    for file in (run.metrics, run.result):
        file.write_bytes(file.read_bytes().replace(b"0.125", b"0.135"))
    found = collect(tmp_path)
    assert found.rows == 2
    assert found.problems == [
        (str(run.path), "metrics.jsonl", "1 damaged line"),
        (str(run.path), "result.json", "is no JSON object, or its checksum is wrong"),
    ]


def test_a_changed_config_is_named(tmp_path: Path) -> None:
    run = create(tmp_path / "runs" / "r", "train:\n  batch_size: 8\n", {})
    problem = (str(run.path), "config.yaml", "was changed after hpcrun wrote it")
    assert problem not in collect(tmp_path).problems
    run.config.write_text(run.config.read_text().replace("8", "9"))
    assert problem in collect(tmp_path).problems


def test_numbers_that_nothing_can_hold_cost_one_run_only(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run("odd", [1.0])
    make_run("good", [1.0])
    huge = "1" + "0" * 400
    run.record.write_text(f'{{"created": {huge}, "note": {huge}}}')
    run.config.write_text(f"model: {{size: {huge}}}\n")
    with run.events.open("a") as events:
        events.write(f'{{"time": {huge}, "event": "ended"}}\n{{"event": "x", "n": {huge}}}\n')
    found = collect(tmp_path)
    assert [(file, what) for _, file, what in found.problems] == [
        ("events.jsonl", "1 damaged line"),
        ("run.json", "created: is too large, and read as NaN"),
    ]
    assert found.rows == 2
    with ResultsFile(tmp_path / "results.h5") as store:
        assert store.config("odd")["model.size"] == int(huge)
    for number, (step, loss) in enumerate(((2**70, 1.0), (1e300, 1.0), (3, 10**400))):
        wide = make_run(f"wide-{number}", [1.0])
        append_line(wide.metrics, {"step": step, "loss": loss, "": 1})
    named = [what for _, _, what in collect(tmp_path).problems[len(found.problems) :]]
    assert len(named) == 1
    assert named[0].startswith('loss: "1000')
    assert named[0].endswith('…" in line 2 is no number, and read as NaN')
    with ResultsFile(tmp_path / "results.h5") as store:
        assert store.table("runs")["step"].tolist() == [10, 10, -1, -1, 3]
        odd = store.metrics("wide-2")
        assert odd is not None
        assert np.isnan(odd["loss"][1])
        assert odd["_"][1] == 1


def test_many_long_names_of_metrics_cost_columns_of_one_run(
    tmp_path: Path, make_run: MakeRun
) -> None:
    run = make_run("wide")
    names = [f"{number:03d}".ljust(40, "x") for number in range(700)]
    append_line(run.metrics, {"step": 1, **dict.fromkeys(names, 0.5)})
    append_line(run.metrics, {"step": 2, **dict.fromkeys(names, True)})
    make_run("good", [1.0])
    found = collect(tmp_path)
    beyond, *odd = [what for _, _, what in found.problems]
    assert beyond == "columns beyond 600 are dropped"
    assert odd[0] == f'{names[0]}: "true" in line 2 is no number, and read as NaN'
    assert odd[10:] == ["589 more columns have values that do not fit"]
    with ResultsFile(tmp_path / "results.h5") as store:
        wide = store.metrics("wide")
        assert wide is not None
        assert wide.dtype.names == ("step", *names[:599])
        assert store.metrics("good") is not None


def test_names_and_texts_that_hdf5_refuses_are_kept(tmp_path: Path, make_run: MakeRun) -> None:
    odd = ["a\0b", "a\0c", ".", "..", "train/loss", "train__loss", "/", "x" * 300]
    line = {name: float(number) for number, name in enumerate(odd)} | {"text": "end\0of", "step": 1}
    append_line(make_run("bad").metrics, line)
    make_run("good", [1.0])
    found = collect(tmp_path)
    assert (found.rows, found.problems) == (2, [])
    with ResultsFile(tmp_path / "results.h5") as store:
        metrics = store.metrics("bad")
        assert metrics is not None
        assert [metrics[name][0] for name in odd[2:]] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert metrics["a\\x00b"][0] == 0.0
        assert metrics["text"].tolist() == [b"end\\x00of"]
        assert store.metrics("good") is not None
