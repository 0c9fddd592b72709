"""The search with Optuna in docs/sweeps.md: a trial is a run, also over a preemption and a pruning."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import hpcrun
from tests.jobs import PATIENCE
from tests.pages import code_blocks

pytestmark = pytest.mark.skipif(
    find_spec("optuna") is None, reason="optuna is not installed: pip install 'hpcrun[search]'"
)
ROOT = Path(__file__).resolve().parents[2]
GOOD, BAD = {"lr": 0.01}, {"lr": 1e-5}


def prepare(folder: Path) -> None:
    """Write the program of the page, its task with slow steps, and the first values of the search."""
    (program,) = code_blocks((ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8"), "python")
    for shown, changed in (("20, 4", "3, 1"), ("sleep(10)", "sleep(0.2)")):
        assert shown in program
        program = program.replace(shown, changed)
    (folder / "search.py").write_text(program)
    (task,) = code_blocks((ROOT / "docs" / "first-task.md").read_text(encoding="utf-8"), "python")
    slow = task.replace(
        "        x, y = batch\n", "        x, y = batch\n        time.sleep(0.03)\n"
    )
    assert slow != task
    (folder / "my_module.py").write_text(f"import time\n{slow}")
    import optuna

    study = optuna.create_study(study_name="lr", storage=f"sqlite:///{folder}/lr.db")
    for values in (GOOD, BAD, GOOD):
        study.enqueue_trial(values)


def check_trials(folder: Path, shown: str) -> None:
    """Check the trials after trial 2 was preempted."""
    import optuna

    study = optuna.load_study(study_name="lr", storage=f"sqlite:///{folder}/lr.db")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    first, _, last = study.trials
    # The preemption changes no bit of the training.
    assert first.value == last.value
    assert first.intermediate_values == last.intermediate_values
    assert shown.endswith("{'lr': 0.01}\n")


@pytest.mark.slow
def test_a_preempted_trial_stays_and_a_pruned_trial_is_cancelled(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "here.yaml").write_text("job: {executor: local, cpu: true, requeue_delay: 0.1}\n")
    search = subprocess.Popen(
        [sys.executable, "search.py"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HPCRUN_PROFILE": "./here.yaml"},
    )  # fmt: skip
    try:
        run, late = None, time.monotonic() + PATIENCE
        while run is None or not run.metrics():
            assert search.poll() is None
            assert time.monotonic() < late
            if run is None and (tmp_path / "runs/lr-2/config.yaml").exists():
                run = hpcrun.open(str(tmp_path / "runs" / "lr-2"))
            time.sleep(0.1)
        run.preempt()
        shown, _ = search.communicate(timeout=PATIENCE)
    finally:
        search.kill()
    assert search.returncode == 0
    check_trials(tmp_path, shown)
    runs = [hpcrun.open(str(tmp_path / "runs" / f"lr-{number}")) for number in range(3)]
    assert [run.status()["state"] for run in runs] == ["finished", "cancelled", "finished"]
    assert [run.status()["attempts"] for run in runs] == [1, 1, 2]
