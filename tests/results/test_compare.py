"""Groups of runs over their seeds, and the command that prints them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrun.cli.main import guarded
from hpcrun.results.collect.aggregate import RunSource, aggregate
from hpcrun.results.collect.columns import counted
from hpcrun.results.collect.run_reader import find_runs
from hpcrun.results.groups import Question, RunGroup, grouped, lower_is_better
from hpcrun.results.store import ResultsFile
from hpcrun.run.files import append_line, write_json
from tests.results.conftest import MakeRun


def collected(folder: Path) -> Path:
    output = folder / "results.h5"
    aggregate(RunSource(find_runs([str(folder / "runs")], folder)), output, processes=0)
    return output


def groups_of(folder: Path, **question: Any) -> list[RunGroup]:
    with ResultsFile(collected(folder)) as store:
        return grouped(store, Question(**{"metric": "loss", **question}))


@pytest.fixture
def sweep(make_run: MakeRun) -> None:
    """Make two learning rates with three seeds."""
    for lr in (0.01, 0.0003):
        for seed in range(3):
            config = {"train": {"lr": lr}, "job": {"nodes": 1 + seed}}
            make_run(
                f"lr{lr}-s{seed}", [3.0, 1.0 + lr * 10 + seed, 2.0 + lr], seed=seed, config=config
            )


@pytest.mark.usefixtures("sweep")
def test_runs_group_by_config_without_seed_and_job(tmp_path: Path) -> None:
    low, high = groups_of(tmp_path)
    assert (low.label, high.label) == ("train.lr=0.0003", "train.lr=0.01")
    assert sorted(one.seed for one in low.values) == [0, 1, 2]
    assert high.numbers() == [2.01] * 3
    best = min(high.values, key=lambda one: one.best)
    assert (best.best, best.best_step) == (1.1, 20)
    low, high = groups_of(tmp_path, at="20")
    assert sorted(high.numbers()) == pytest.approx([1.1, 2.1, 3.1])
    assert len(groups_of(tmp_path, by=["train.steps"])) == 1


@pytest.mark.usefixtures("sweep")
def test_every_run_that_does_not_count_has_a_reason(tmp_path: Path, make_run: MakeRun) -> None:
    config = {"train": {"lr": 0.01}}
    make_run("failed", [1.0], state="failed", seed=3, config=config)
    make_run("running", [1.0], state=None, seed=4, config=config)
    make_run("new", state="new", seed=5, config=config)
    make_run("diverged", [1.0, None], seed=6, config=config)
    make_run("silent", seed=7, config=config)
    old = make_run("old", [9.0], seed=0, config=config)
    write_json(old.record, {"created": 1.0})
    _, high = groups_of(tmp_path)
    assert len(high.values) == 3
    assert {run: why for run, _, why in high.left_out} == {
        "failed": "failed",
        "running": "unfinished",
        "new": "new",
        "diverged": "loss is not finite at step 20",
        "silent": "has no loss",
        "old": "has the seed of lr0.01-s0, which is newer",
    }
    for at in ("best", "10"):
        _, high = groups_of(tmp_path, at=at)
        assert ("diverged", 6, "loss is not finite at step 20") in high.left_out


def test_a_swept_script_and_one_by_hand_share_their_seeds(
    tmp_path: Path, make_run: MakeRun
) -> None:
    for number in (1, 2):
        command = ["train.py", "--seed", str(number)]
        make_run(f"hand{number}", [1.0], config={"command": [*command, "--lr=0.5"]})
        swept = make_run(f"swept{number}", [1.0], config={"command": [*command, "--lr=0.1"]})
        values = {"data.seed": number, "lr": 0.1}
        template = ["train.py", "--seed", "{seed}", "--lr={lr}"]
        write_json(swept.record, {"sweep": {"values": values, "command": template}})
    make_run("hand3", [1.0], config={"command": ["train.py", "--seed=3", "--lr=0.5"]})
    groups = groups_of(tmp_path)
    # The seed of the config is 0 in all runs; the script got another.
    assert [sorted(one.seed for one in group.values) for group in groups] == [[1, 2], [1, 2, 3]]
    assert not any(group.left_out for group in groups)


def test_computed_values_have_few_digits(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("a", [1.0], config={"train": {"lr": 0.020000000000000004}})
    make_run("b", [1.0], config={"train": {"lr": 1 / 3}})
    labels = [group.label for group in groups_of(tmp_path)]
    assert labels == ["train.lr=0.02", "train.lr=0.333333333333"]
    # An equal value after rounding is the same config.
    make_run("c", [1.0], seed=1, config={"train": {"lr": 0.02}})
    assert sorted(len(group.values) for group in groups_of(tmp_path)) == [1, 2]


@pytest.mark.usefixtures("sweep")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--metric", "lost"], "--metric lost: no run has it; there is: loss"),
        (["--at", "soon"], "should be last, best or a step"),
        (["--against", "3"], "choose a row from 1 to 2"),
        (["--by", "train.rl"], "no run has this key"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert guarded(["compare", str(collected(tmp_path)), *words]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


def test_a_folder_of_runs_gets_the_right_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["compare", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"is a folder, and no results file; `hpcrun aggregate {tmp_path} -o" in said
    assert "move it away" not in said


@pytest.mark.parametrize(
    ("steps", "restarts", "kept"),
    [
        ([1, 2, 2, 3], [0, 0, 0, 0], None),
        ([1, 2, 2, 3], [0, 0, 1, 1], [1, 0, 1, 1]),
        ([1, 2, 3, 2, 3, 1, 2], [0, 0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 1, 1]),
        # A line without a restart belongs to the line before.
        ([1, 2, 2, 2, 2], [0, 0, np.nan, 1, np.nan], [1, 0, 0, 1, 1]),
    ],
)
def test_rows_that_count(steps: list[int], restarts: list[float], kept: list[int] | None) -> None:
    found = counted({"step": np.array(steps), "restart": np.array(restarts)}, len(steps))
    assert (None if found is None else found.tolist()) == kept


def test_values_of_restarts_validations_and_results(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run("r", [3.0, 0.1, 0.2])
    for step, loss in ((20, 2.0), (30, 1.0)):
        append_line(run.metrics, {"step": step, "time": 1.0, "restart": 1, "loss": loss})
    append_line(run.metrics, {"step": 30, "validation_loss": 1.5})
    write_json(run.result, {"state": "finished", "steps": 30, "report": {"accuracy": 0.9}})
    ((value,),) = [group.values for group in groups_of(tmp_path)]
    assert (value.value, value.best, value.best_step) == (1.0, 1.0, 30)
    for metric, at, number in (
        ("loss", "20", 2.0),
        ("validation_loss", "30", 1.5),
        ("result.report.accuracy", "last", 0.9),
    ):
        assert groups_of(tmp_path, metric=metric, at=at)[0].numbers() == [number]


def test_runs_without_a_config_are_one_group(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    good = make_run("good", [1.0])
    make_run("bad", [1.0]).config.write_bytes(b"\x00\xff")
    labels = [group.label for group in groups_of(tmp_path)]
    assert sorted(labels) == ["all runs", "config unknown"]
    good.config.unlink()
    assert guarded(["compare", str(collected(tmp_path))]) == 0
    assert "no run has a config, so the runs form one group" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lower", "metrics"),
    [
        (True, "validation_loss dice_loss self1 bitmap_bytes previous_time indices top1_error"),
        (False, "top1_Accuracy tokens_per_second val/top-5 mAP50 mIoU dice PSNR win_rate val/F1"),
    ],
)
def test_the_name_of_a_metric_tells_its_direction(lower: bool, metrics: str) -> None:
    assert {lower_is_better(metric) for metric in metrics.split()} == {lower}


@pytest.mark.usefixtures("sweep")
def test_tables_and_json(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("one", [4.0], seed=9, config={"train": {"lr": 0.5}})
    make_run("bad", [1.0], seed=8, state="failed", config={"train": {"lr": 0.5}})
    file = str(collected(tmp_path))
    assert guarded(["compare", file, "--at", "best"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "loss (best, min is best), 95% intervals"
    assert not any("different steps" in line for line in lines)
    # The run with one row ends at another step.
    assert guarded(["compare", file]) == 0
    caution = (
        "caution: the last values are of different steps, 10 to 30; --at 10 compares at one step"
    )
    assert caution in capsys.readouterr().out.splitlines()
    row = "1 3 1.6679 0.23752 … 3.0982 0.57579 1.003"
    assert lines[2].split() == [*row.split(), "train.lr=0.0003"]
    assert " ".join(lines[4].split()) == "3 1 4 - - 4 train.lr=0.5"
    assert lines[5].startswith("caution: the best of many noisy values")
    assert lines[7] == "best:   train.lr=0.0003 (seeds 0, 1, 2)"
    facts = "interval -0.086407 … 0.16401, p 0.31401, paired t, 3 seeds"
    assert lines[8] == f"second: train.lr=0.01, +0.0388 ({facts})"
    assert " ".join(lines[12].split()).endswith("0.31401 0/3 paired t, 3 seeds train.lr=0.01")
    assert " ".join(lines[13].split()) == "3 2.3321 - - - - train.lr=0.5"
    assert "  row 3: bad (seed 8): failed" in lines
    assert guarded(["compare", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(group["runs"]) for group in found["groups"]] == [3, 3, 1]
    assert found["groups"][1]["comparison"]["sizes"] == [3, 3]


def test_the_best_config_is_first_and_an_empty_config_last(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    for lr, first, values in ((0.1, 0, [3, 3.1]), (0.2, 5, [1, 1.1, 1.3]), (0.3, 5, [2, 2.2, 2.1])):
        for seed, value in enumerate(values, first):
            make_run(f"{lr}-{seed}", [value], seed=seed, config={"train": {"lr": lr}})
    make_run("empty", [0.1], state="failed", config={"train": {"lr": 0.01}})
    file = str(collected(tmp_path))
    assert guarded(["compare", file]) == 0
    out = capsys.readouterr().out
    labels = [line.split()[-1] for line in out.splitlines()[2:6]]
    assert labels == [f"train.lr={lr}" for lr in (0.2, 0.3, 0.1, 0.01)]
    assert "best:   train.lr=0.2 (seeds 5, 6, 7)\nsecond: train.lr=0.3, +0.96667 (interval" in out
    rows = [line for line in out.splitlines() if "paired t," in line or "Welch," in line]
    rows = rows[1:]
    assert [" ".join(row.split()[-6:-1]) for row in rows] == [
        "0/3 paired t, 3 seeds",
        "Welch, 2 and 3 runs",
    ]
    assert "p is corrected for 3 tests of all rows (Holm)" in out
    assert guarded(["compare", file, "--goal", "max", "--against", "3"]) == 0
    out = capsys.readouterr().out
    assert "best:   train.lr=0.1 (seeds 0, 1)\n\n" in out
    assert "p is corrected for 2 tests with row 3 (Holm)" in out
    assert guarded(["compare", file, "--against", "4"]) == 2
    assert (
        "--against 4: no run of such a row counts; choose a row from 1 to 3"
        in capsys.readouterr().err
    )


def test_a_best_mean_that_loses_on_common_seeds(
    tmp_path: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first config lacks the two seeds that are bad for both.
    for lr, values in ((0.1, [1, 1.1]), (0.2, [0.9, 1, 5, 6])):
        for seed, value in enumerate(values):
            make_run(f"{lr}-{seed}", [value], seed=seed, config={"train": {"lr": lr}})
    assert guarded(["compare", str(collected(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert "best:   train.lr=0.1" in out
    assert "caution: over the common seeds the second is better" in out


def test_runs_of_equal_seed_but_other_config_all_count(tmp_path: Path, make_run: MakeRun) -> None:
    for lr in (0.1, 0.2):
        for size in (16, 32):
            config = {"train": {"lr": lr, "batch_size": size}}
            make_run(f"{lr}-{size}", [lr * size], seed=1, config=config)
    low, high = groups_of(tmp_path, by=["train.lr"])
    assert (sorted(low.numbers()), sorted(high.numbers())) == ([1.6, 3.2], [3.2, 6.4])
    assert {one.pair for one in low.values} == {one.pair for one in high.values}
    assert not low.left_out
