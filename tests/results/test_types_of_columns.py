"""A value that does not fit its column is named with its line, and changes nothing else."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrun.results.store import ResultsFile
from tests.results.test_mapping import mapped, metrics

LOG = 'metrics: ["m.*"]\nrows: log\nstep: step'
NAN = float("nan")


def column(found: Any, name: str) -> list[Any]:
    return [None if value != value else value for value in found[name].tolist()]


def collected(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes | str,
    text: str = LOG,
) -> list[str]:
    """Aggregate one run with one file, and return the problems."""
    run = folder / "runs" / "a"
    run.mkdir(parents=True)
    (run / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert mapped(folder, text) == 0, capsys.readouterr().err
    with ResultsFile(folder / "results.h5") as store:
        return [row["problem"].decode() for row in store.table("problems")]


def jsonl(*values: Any) -> str:
    return "".join(
        json.dumps({"step": step, "loss": value}) + "\n" for step, value in enumerate(values, 1)
    )


@pytest.mark.parametrize(
    ("name", "content", "loss", "problems"),
    [
        ("m.csv", "step,loss\n1,0.9\n2,N/A\n3,0.7\n", [0.9, None, 0.7], ['"N/A" in line 3 is no number']),
        ("m.csv", "step,loss\n1,0.9\n2,tensor(0.8)\n3,0.7\n", [0.9, None, 0.7], ['"tensor(0.8)" in line 3']),
        ("m.csv", 'step,loss\n1,0.9\n2,"1,234.5"\n3,7\n4,x\n', [0.9, None, 7, None], ["also line 5"]),
        ("m.csv", "step,loss\n1,0.9\n2,\n3,1_0\n", [0.9, None, None], ['"1_0" in line 4']),
        ("m.csv", "step,loss\n1,0.9\n2,True\n3,2\n", [0.9, None, 2], ['"True" in line 3']),
        ("m.csv", "step,loss\n1,nan\n2,-inf\n3,Infinity\n4,1\n", [None, -np.inf, np.inf, 1], []),
        ("m.csv", "step,loss\n1,tensor(8)\n2,tensor(7)\n", [b"tensor(8)", b"tensor(7)"], ["is a text"]),
        ("m.csv", "step,loss\n1,True\n2,False\n", [True, False], []),
        ("m.csv", "step,loss\n1,warm\n2,cold\n3,7\n", [b"warm", b"cold", b"7"], []),
        ("m.csv", 'step,loss,n\n1,0.9,"a\nb"\n2,?,c\n', [0.9, None], ['"?" in line 4']),
        ("m.csv", "step\tloss\n1\t0.9\n2\t0.8\n", [0.9, 0.8], []),
        ("m.csv", "step;loss\n1;0,9\n2;3\n", [None, 3], ['"0,9" in line 2 is no number']),
        ("m.tsv", "step,loss\n1,0.9\n", [0.9], []),
        ("m.csv", b"\xef\xbb\xbfstep,loss\r\n1,0.9\r\n2,0.8\r\n", [0.9, 0.8], []),
        ("m.csv", "step,loss\n1,0.9\n2\n3,0.7,4\n4,0.6\n", [0.9, 0.6], ["2 damaged lines (3, 4)"]),
        ("m.csv", "step,loss,loss\n1,0.9,0.8\n", [0.8], ["column loss is there 2 times"]),
        ("m.jsonl", jsonl(0.9, "0.8", 0.7), [0.9, 0.8, 0.7], ['"0.8" in line 2 is a text']),
        ("m.jsonl", jsonl("0.9", "0.8"), [0.9, 0.8], ['"0.9" in line 1 is a text, and read as a']),
        ("m.jsonl", jsonl(1, "N/A", 3), [1, None, 3], ['"N/A" in line 2']),
        ("m.jsonl", jsonl(0.5, True, 3), [0.5, None, 3], ['"true" in line 2']),
        ("m.jsonl", jsonl(0.5, "NaN", "-Infinity"), [0.5, None, -np.inf], []),
        ("m.jsonl", jsonl("a", "b", 7), [b"a", b"b", b"7"], ['"7" in line 3 is a number among texts']),
        ("m.jsonl", jsonl("007", "008"), [b"007", b"008"], []),
        ("m.jsonl", "bad\n\n" + jsonl(1, "x", None, 2), [1, None, None, 2], ["1 damaged", '"x" in line 4']),
        ("m.jsonl", b"\xef\xbb\xbf" + jsonl(1, 2).encode(), [1, 2], []),
        ("m.jsonl", jsonl([1, 2], [3, 4]), [b"[1,2]", b"[3,4]"], ["lists of loss are kept as JSON texts"]),
        ("m.json", '{"step": [1, 2], "loss": [0.9, "N/A"]}', [0.9, None], ['"N/A" in row 2']),
        ("m.json", '{"step": [1, 2], "loss": [1, 2], "epochs": 3}', [1, 2], ["epochs is no list"]),
    ],
)  # fmt: skip
def test_values_keep_the_type_of_their_column(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes | str,
    loss: list[Any],
    problems: list[str],
) -> None:
    named = collected(tmp_path, capsys, name, content)
    assert column(metrics(tmp_path), "loss") == loss
    assert len(named) == len(problems), named
    for words, line in zip(problems, named, strict=True):
        assert words in line


RESUMED = "epoch,step,loss\n0,1,0.9\n0,2,0.8\n1,3,0.7\n{}\n1,3,0.71\n2,4,0.6\n"


@pytest.mark.parametrize(
    "header", ["epoch,step,loss", "\ufeffepoch,step,loss", "epoch,step,loss\r"]
)
def test_a_repeated_header_begins_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: str
) -> None:
    assert collected(tmp_path, capsys, "m.csv", RESUMED.format(header)) == []
    found = metrics(tmp_path)
    assert found["step"].tolist() == [1, 2, 3, 3, 4]
    assert found["restart"].tolist() == [0, 0, 0, 1, 1]
    with ResultsFile(tmp_path / "results.h5") as store:
        (row,) = (row for row in store.table("summary") if row["metric"] == b"loss")
    # The first row of step 3 is overwritten.
    assert (row["rows"], row["last"], row["min"]) == (4, 0.6, 0.6)


@pytest.mark.parametrize(
    ("content", "text", "problems", "rows"),
    [
        ("", LOG, ["is empty"], 0),
        ("\n \n", LOG, ["is empty"], 0),
        ("step,loss\n", LOG, ["has a header, and no rows"], 0),
        ("1,0.9\n2,0.8\n", LOG, ["cannot be parsed: has no header"], 0),
        ("step,loss\n1,0.9\nstep,acc\n2,0.8\n", LOG, ["2 damaged lines (3, 4)"], 1),
        ("step,loss\n1,2\nstep,loss,acc\n2,1,3\nstep,loss\n3,0\n", LOG, ["2 damaged lines (3, 4)"], 2),
        ("step loss\n1 0.9\n", LOG, ["no column step, which `step` names; there is step loss"], 1),
        ("s,loss\n1,2\n", LOG.replace("step: step", "step: global_step"), ["no column global_step"], 1),
        ("step,loss\n1,2\n", LOG + "\nrename: {acc: a, los: b}", ["acc, which `rename`", "los, which"], 1),
        ("step,loss\n1,2\n", LOG + "\ntime: when\nrename: {loss: x}", ["when, which `time` names"], 1),
    ],
)  # fmt: skip
def test_what_the_mapping_does_not_find_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    text: str,
    problems: list[str],
    rows: int,
) -> None:
    named = collected(tmp_path, capsys, "m.csv", content, text)
    assert len(named) == len(problems), named
    for words, line in zip(problems, named, strict=True):
        assert words in line
    with ResultsFile(tmp_path / "results.h5") as store:
        assert store.table("runs")["rows"].tolist() == [rows]


def test_nested_lists_of_a_json_file_get_names_with_dots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = '{"step": [1, 2], "train": {"loss": [0.5, 0.4], "by": {"class": [3, 4]}}, "lr": 0.1}'
    named = collected(tmp_path, capsys, "m.json", content)
    assert metrics(tmp_path).dtype.names == ("step", "train.loss", "train.by.class")
    assert [line for line in named if "lr is no list" in line] == named


def test_texts_of_one_file_among_numbers_of_another_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "m.1.csv").write_text("step,loss\n3,?\n")
    named = collected(tmp_path / "b", capsys, "m.0.csv", "step,loss\n1,0.9\n2,0.8\n")
    assert named == []
    (run / "m.0.csv").write_text("step,loss\n1,0.9\n2,0.8\n")
    assert mapped(tmp_path, LOG) == 0
    assert column(metrics(tmp_path), "loss") == [0.9, 0.8, None]
    assert 'm.0.csv and m.1.csv: loss: "?" in row 3 is no number' in capsys.readouterr().out
