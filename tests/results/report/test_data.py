"""Numbers of plots and reports, against hand-made numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcrun.results.report.content import swept_keys
from hpcrun.results.report.figures import Series, band, curve_figure, thinned
from hpcrun.results.report.plotting import Curve, bar, plot
from hpcrun.results.report.times import (
    FINISHED,
    LOST,
    MOST_ROWS,
    PREEMPTED,
    QUEUED,
    RUNNING,
    SAVED,
    STARTING,
    chosen_rows,
    timeline,
)

from .conftest import START, MakeRun, add_event, read


def test_a_band_is_the_t_interval_over_the_shared_steps() -> None:
    steps = np.array([1.0, 2.0, 3.0])
    found = band([(steps, np.array([1.0, 2.0, 3.0])), (steps[:2], np.array([3.0, 4.0]))])
    mean, half = found
    assert mean.index.tolist() == [1.0, 2.0]
    assert mean.tolist() == [2.0, 3.0]
    # t(0.975, 1) = 12.7062, standard deviation sqrt(2), n = 2.
    assert half is not None
    assert half[0] == pytest.approx(12.7062, abs=1e-3)


def test_a_thinned_curve_keeps_its_extremes() -> None:
    x = np.arange(10_000.0)
    y = np.sin(x)
    y[7777] = 9.0
    fewer_x, fewer_y = thinned(x, y)
    assert len(fewer_x) <= 402
    assert fewer_y.max() == 9.0


def test_swept_keys_leave_out_seed_and_place(make_run: MakeRun, tmp_path: Path) -> None:
    for seed, rate in ((0, 0.1), (1, 0.1), (0, 0.2)):
        job = {"mem": f"{seed + 1}G"}
        make_run(f"r{seed}-{rate}", seed=seed, config={"train": {"lr": rate}, "job": job})
    runs = read(tmp_path / "runs")
    assert swept_keys(runs) == ["train.lr"]


def test_options_of_a_command_are_swept(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a", config={"command": ["python", "x.py", "--lr", "0.1", "--fast"]})
    make_run("b", config={"command": ["python", "x.py", "--lr=0.2"]})
    runs = read(tmp_path / "runs")
    assert {run.config["--lr"] for run in runs} == {0.1, 0.2}
    assert "--lr" in swept_keys(runs)


def test_a_timeline_shows_lost_work_and_waits(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a")
    make_run("unfinished", state=None)
    run, other = read(tmp_path / "runs")
    # An unfinished run ends at its last sign.
    assert timeline(other.events, other.seen).spans[-1][2] == START + 65
    found = timeline(run.events, run.ended)
    spans = [(kind, start - START, end - START) for kind, start, end in found.spans]
    assert spans[0] == (QUEUED, 0.0, 10.0)
    assert (RUNNING, 15.0, 40.0) in spans
    assert (LOST, 40.0, 50.0) in spans
    kinds = [kind for kind, _, _ in found.marks]
    assert kinds == [SAVED, PREEMPTED, SAVED, FINISHED]
    covered = sum(end - start for _, start, end in found.spans)
    assert covered == pytest.approx(run.goodput.wall)


def test_a_timeline_agrees_with_goodput_on_a_start_from_memory(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run = make_run("a", state=None)
    lines = run.events.read_text().splitlines()[:-2]
    run.events.write_text("\n".join(lines) + "\n")
    add_event(run, "opened", 52, in_place=1)
    add_event(run, "started", 53, in_place=1, step=27, on_disk=20, snapshot=START + 47)
    (one,) = read(tmp_path / "runs")
    spans = [
        (kind, start - START, end - START)
        for kind, start, end in timeline(one.events, START + 60).spans
    ]
    assert spans[2:] == [
        (RUNNING, 15.0, 47.0),
        (LOST, 47.0, 50.0),
        (STARTING, 50.0, 53.0),
        (RUNNING, 53.0, 60.0),
    ]
    add_event(run, "ended", 70, in_place=1, cause="node-failure", restart_allowed=True)
    add_event(run, "opened", 80, restart=1)
    (one,) = read(tmp_path / "runs")
    lost = [
        end - start for kind, start, end in timeline(one.events, one.seen).spans if kind == LOST
    ]
    assert sum(lost) == one.goodput.recomputed == 10 + 17


def test_a_long_event_keeps_its_decision(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a", state=None)
    with run.events.open("a") as stream:
        stream.write(
            f'{{"time":{START + 70},"event":"ended","job":"7","restart":1,"cause":"crash",'
            f'"reason":"{"long " * 200}","restart_allowed":false,"last_seen":{START + 69},"exit":"12"}}\n'
        )
    (found,) = read(tmp_path / "runs")
    fields = found.events[-1].fields
    assert (fields["restart_allowed"], fields["last_seen"], fields["exit"]) == (
        False,
        START + 69,
        "12",
    )
    assert fields["reason"].startswith("long long")


def test_a_terminal_plot_fits_its_width() -> None:
    x = np.arange(100.0)
    equal = plot("lr", [Curve("a", x, 0 * x + 0.1), Curve("b", x, 0 * x + (0.1 + 0.2) / 3)], 60, 8)
    assert [line.count("b") for line in equal].count(0) == len(equal) - 1
    one = plot("loss", [Curve("a", x, 1 + x)], 60, 8)
    two = plot("loss", [Curve("a", x, 1 + x), Curve("b", x, 5 + x)], 60, 8)
    assert max(map(len, one + two)) <= 60
    assert len(one) == 11
    assert any("b" in line for line in two[1:9])
    assert plot("loss", [Curve("a", x[:0], x[:0])], 60, 8) == []
    assert bar(0.5, 4) == "██  "


def test_figures_of_many_runs_show_a_sample_and_say_so(make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a")
    (run,) = read(tmp_path / "runs")
    runs = [
        replace(run, key=f"r{number}", state="failed" if number % 10 == 0 else "finished")
        for number in range(200)
    ]
    rows = chosen_rows(runs)
    assert len(rows) == MOST_ROWS
    assert sum(row.state == "failed" for row in rows) == 20
    drawn = curve_figure(1, "loss", [Series(one.key, [one]) for one in runs])
    assert drawn is not None
    assert "an even sample of 60 of 194 more configs" in drawn.caption
    assert len(drawn.titles) == 66
    dashed = curve_figure(1, "loss", [Series("a", [run], runs)])
    assert dashed is not None
    assert len(dashed.figure.axes[0].lines) == 61
