"""A sweep from Python: submitted, waited for, cancelled, its results, and what is refused."""

import json
import sys
from pathlib import Path

import pytest

import hpcrun
from tests.support import jobs

ELEMENT = """
import pathlib, sys, time
lr, seed = float(sys.argv[1]), int(sys.argv[2])
pathlib.Path(f"began-{lr}-{seed}").touch()
while seed == 1 and not pathlib.Path("go").exists():
    time.sleep(0.05)
sys.exit(3 if lr > 1 else 0)
"""


def test_a_sweep_is_submitted_cancelled_submitted_again_and_has_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "element.py").write_text(ELEMENT)
    given = {
        "command": [sys.executable, "element.py", "{lr}", "{seed}"],
        "name": "s",
        "executor": "local",
        "cpu": True,
        "nodes": 1,
        "snapshot": False,
        "overrides": {"restarts.crash": 0},
        "max_parallel": 4,
    }
    axes = {"lr": [0.1, 2.0], "seed": range(2)}
    sweep = hpcrun.submit(sweep=axes, **given)
    assert (len(sweep), repr(sweep)) == (4, f"<hpcrun.Sweep {str(tmp_path / 'runs' / 's')!r}>")
    assert sweep.values["003"] == {"lr": 2.0, "seed": 1}
    jobs.wait_for(lambda: len(list(tmp_path.glob("began-*"))) == 4)
    jobs.wait_for(lambda: sum(row["state"] != "running" for row in sweep.status()) == 2)
    with pytest.raises(TimeoutError, match="2 runs have not ended"):
        sweep.wait(timeout=0.1)
    sweep.cancel()
    assert sweep.wait() == {"finished": 1, "failed": 1, "cancelled": 2}
    more = hpcrun.submit(sweep={"lr": [2.0, 0.2], "seed": [0]}, only_new=True, **given)
    ends = {"finished": 2, "failed": 1, "cancelled": 2}
    assert (more["002"].status()["attempts"], more.wait(timeout=jobs.PATIENCE)) == (1, ends)
    (tmp_path / "go").touch()
    again = hpcrun.submit(sweep=axes, **given)
    assert again.wait(timeout=jobs.PATIENCE) == {"finished": 3, "failed": 2}
    assert [run.name for run in again] == [f"s/00{number}" for number in range(5)]
    assert again["002"].result()["state"] == "failed"
    for number, run in enumerate(again):
        line = {"step": 1, "time": 1.0, "loss": number + 0.5}
        (run.path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    frame = again.results().runs()
    assert sorted(frame["state"]) == ["failed"] * 2 + ["finished"] * 3
    with pytest.raises(hpcrun.UserError, match=r"is a sweep; .* \(in Python: hpcrun\.Sweep\)"):
        hpcrun.open("s")
    with pytest.raises(hpcrun.UserError, match=r"no such run in .*; did you mean s\?"):
        hpcrun.open("sa")
    # Names of folders only, such as 000, would be the same in every sweep.
    plot = jobs.hpcrun("plot", "runs/s", cwd=tmp_path)
    assert "s/000 lr=0.1 seed=0 (finished)" in plot.stdout
    compared = jobs.hpcrun("compare", "runs/s/results.h5", cwd=tmp_path)
    assert "s/003 (seed 1): failed" in compared.stdout
    assert hpcrun.Sweep("runs/s").values["004"] == {"lr": 0.2, "seed": 0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sweep": {}}, "sweep=: has no key"),
        ({"sweep": {"seed": 3}}, "sweep=: seed: give a list of values"),
        ({"sweep": {"seed": "123"}}, "sweep=: seed: give a list of values"),
        ({"sweep": {"seed": []}}, "sweep=: seed: has no values"),
        ({"sweep": {"trian.lr": [1]}}, "did you mean train"),
        ({"sweep": {"seed": [1]}, "max_parallel": 0}, "max_parallel="),
        ({"sweep_file": "none.yaml"}, "no such file"),
        ({"max_parallel": 2}, "max_parallel=: is for sweeps only"),
        ({"only_new": True}, "only_new=: is for sweeps only"),
    ],
)
def test_what_is_refused_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hpcrun.UserError) as refused:
        hpcrun.submit(name="s", executor="local", cpu=True, **options)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_no_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hpcrun.UserError, match="is not the folder of a sweep"):
        hpcrun.Sweep(tmp_path)
