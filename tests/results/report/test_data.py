"""Numbers of plots and reports, against hand-made numbers."""

import sys
from pathlib import Path

import numpy as np

from hpcrun.results.frames import load_results
from hpcrun.results.groups import Question, grouped
from hpcrun.results.report.content import swept_keys, thinned
from hpcrun.results.report.plotting import Curve, plot
from hpcrun.results.report.runs import iterate_runs, open_results
from hpcrun.run.sweep_file import read_sweep
from hpcrun.slurm.launch import jobs as run_jobs
from tests.support import jobs

from .conftest import START, MakeRun, read

LINE = ("--sweep", "lr=0.1,0.2", "--sweep", "seed=3:5", "--name", "s", "--executor", "local")
SHAPE = ("--nodes", "1", "--gpus", "1", "--cpu", "--no-snapshot")


def test_a_thinned_curve_keeps_its_extremes() -> None:
    y = np.sin(np.arange(10_000.0))
    y[7777] = 9.0
    kept = thinned(y, 400)
    assert len(kept) <= 400
    assert {0, 7777, 9999} <= set(kept.tolist())


def test_a_long_event_keeps_its_decision(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a", state=None)
    with run.events.open("a") as stream:
        stream.write(
            f'{{"time":{START + 70},"event":"ended","job":"7","restart":1,"cause":"crash",'
            f'"reason":"{"long " * 200}","restart_allowed":false,"last_seen":{START + 69},"exit":"12"}}\n'
        )
    (found,) = read(tmp_path / "runs")
    fields = found.journal.events[-1].own
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


def test_values_of_placeholders_are_parameters(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys, hpcrun; assert os.environ['HF_TOKEN'] == 's3cret'\n"
        "hpcrun.report(step=1, loss=float(sys.argv[1]))\n"
    )
    command = ("--", sys.executable, "script.py", "{lr}", "--seed={seed}")
    done = jobs.hpcrun("submit", *LINE, *SHAPE, "job.env.HF_TOKEN=s3cret", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    sweep = read_sweep(tmp_path / "runs" / "s")
    assert sweep is not None
    runs = list(sweep.directories.values())
    jobs.wait_for(lambda: all(run_jobs.state(run).word == "finished" for run in runs))
    done = jobs.hpcrun("aggregate", "s", "-o", "all.h5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with open_results([str(tmp_path / "all.h5")], tmp_path) as store:
        groups = grouped(store, Question("loss"))
        swept = swept_keys(list(iterate_runs(store)))
        kept = store.document("001", "config")["command"]
    assert [group.label for group in groups] == ["lr=0.1", "lr=0.2"]
    assert [group.numbers() for group in groups] == [[0.1, 0.1], [0.2, 0.2]]
    assert [sorted(one.seed for one in group.values) for group in groups] == [[3, 4]] * 2
    assert swept == ["lr"]
    # The command as it ran is in the file as well.
    assert kept[-2:] == ["0.1", "--seed=4"]
    frame = load_results(tmp_path / "all.h5").runs()
    assert frame["lr"].tolist() == [0.1, 0.1, 0.2, 0.2]
    # The values of job.env are in no file for others.
    shown = [tmp_path / "all.h5", *tmp_path.rglob("run.json"), *tmp_path.rglob("sweep.json")]
    assert not [path for path in shown if b"s3cret" in path.read_bytes()]
    kept = [path for path in (tmp_path / "runs").rglob("*.*") if path.is_file()]
    holders = [path for path in kept if b"s3cret" in path.read_bytes()]
    assert {path.stat().st_mode & 0o777 for path in holders} == {0o600}
