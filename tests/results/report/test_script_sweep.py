"""A sweep of a command with placeholders: its values are parameters of the results and of the report."""

import sys
from pathlib import Path

from hpcrun.results.frames import load_results
from hpcrun.results.groups import Question, grouped
from hpcrun.results.report.content import swept_keys
from hpcrun.results.report.runs import open_results, read_runs
from hpcrun.run.sweep_file import read_sweep
from hpcrun.slurm.launch import jobs as run_jobs
from tests import jobs

LINE = ("--sweep", "lr=0.1,0.2", "--sweep", "seed=3:5", "--name", "s", "--executor", "local")
SHAPE = ("--nodes", "1", "--gpus", "1", "--cpu", "--no-snapshot")


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
        swept = swept_keys(read_runs(store))
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
