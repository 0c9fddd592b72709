"""The output and behavior of a run with a damaged newest checkpoint, or with no checkpoint left."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from hpcrun.run.directory import RunDirectory
from tests.checkpoint.test_quarantine import flip
from tests.cli.conftest import tiny_config
from tests.cli.test_bad_input import require_one_line
from tests.support import jobs


def saved(run: RunDirectory) -> object:
    """Return the step that `hpcrun status` shows as saved."""
    told = jobs.hpcrun("status", "--json", str(run.path), cwd=run.path.parent)
    return json.loads(told.stdout)["committed"]


def test_every_place_shows_the_step_that_is_really_saved(folder: Path) -> None:
    line = tiny_config(folder, train__steps=40, checkpoint__every=6)
    done = jobs.hpcrun("submit", "-c", "empty.yaml", "--name", "r", "--detach", *line, cwd=folder)
    assert done.returncode == 0, done.stderr
    run = RunDirectory(folder / "runs" / "r")
    with jobs.held_at(run, 16):
        stopped = jobs.hpcrun("cancel", "r", cwd=folder)
    first = jobs.result(run)["step"]
    assert first >= 16
    assert f"r is cancelled at step {first}" in stopped.stdout
    assert saved(run) == first

    before = (first - 1) // 6 * 6
    flip(run.checkpoints / f"step-{first:09d}" / "rank-00001.bin")
    with jobs.held(run):
        assert jobs.hpcrun("resume", "r", "--detach", cwd=folder).returncode == 0
        jobs.wait_for(lambda: len(jobs.events(run, "started")) == 2)
        assert jobs.events(run, "started")[1].step == saved(run) == before
        stopped = jobs.hpcrun("cancel", "r", cwd=folder)
    second = jobs.result(run)["step"]
    assert before <= second
    assert f"r is cancelled at step {second}" in stopped.stdout
    assert jobs.events(run, "ended")[-1].step == saved(run) == second
    # Renamed before the first save, so that it does not count among the kept checkpoints.
    assert [path.name[:22] for path in run.checkpoints.glob("damaged-*")] == [
        f"damaged-step-{first:09d}"
    ]
    assert jobs.hpcrun("verify", "r", cwd=folder).returncode == 0

    shutil.rmtree(run.checkpoints)
    assert saved(run) is None
    refused = jobs.hpcrun("resume", "r", cwd=folder)
    require_one_line(refused, f"step {second} was saved, and no checkpoint is left", "--name OTHER")
    # Without `hpcrun resume`, as after a requeue or with an sbatch by hand.
    run.checkpoints.mkdir()
    command = [sys.executable, "-m", "hpcrun.worker", str(run.path)]
    by_hand = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert by_hand.returncode == 2
    assert f"step {second} was saved, and no checkpoint is left" in by_hand.stderr
    assert len(jobs.events(run, "started")) == 2

    new = ("submit", "-c", str(run.config), "--name", "new")
    done = jobs.hpcrun(*new, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert jobs.result(RunDirectory(folder / "runs" / "new"))["steps"] == 40
