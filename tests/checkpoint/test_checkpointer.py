"""The door for others: the page's own example, killed and started again; intervals; what is refused."""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcrun.checkpoint.checkpointer import Checkpointer
from hpcrun.checkpoint.errors import CheckpointError
from hpcrun.checkpoint.interval import EverySeconds, EverySteps, pays, young
from hpcrun.checkpoint.lustre import is_lustre, setstripe_command, stripe
from hpcrun.checkpoint.retention import Retention
from hpcrun.checkpoint.staging import Staging
from hpcrun.checkpoint.together import Together

ROOT = Path(__file__).parents[2]


def example():
    page = (ROOT / "docs" / "checkpointing.md").read_text()
    return re.search(r"```python\n(.*?)```", page, re.S)[1]


def run(text, cwd):
    program = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{text}"]
    return subprocess.run(program, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_page_s_example_ends_the_same_when_it_is_killed_and_run_again(tmp_path):
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    calm.mkdir()
    rough.mkdir()
    undisturbed = run(example(), calm)
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert undisturbed.stdout.startswith("started at 0, best loss ")
    kill = "        if step == 33: ckpt.wait(); import os; os.kill(os.getpid(), 9)\n"
    deadly = example().replace("        x = torch", kill + "        x = torch")
    assert run(deadly, rough).returncode == -9
    again = run(example(), rough)
    assert again.stdout == undisturbed.stdout.replace("started at 0", "started at 30")
    ends = [folder / "checkpoints" / "step-000000050" for folder in (calm, rough)]
    assert all(end.is_dir() for end in ends)


def parts():
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def test_a_failed_save_is_raised_on_leaving_and_the_step_can_be_saved_again(tmp_path):
    place = tmp_path / "file"
    place.write_text("in the way")
    with pytest.raises(CheckpointError, match="step 1 was not saved"):  # noqa: SIM117
        with Checkpointer(place / "checkpoints", **parts()) as ckpt:
            ckpt.save(1)
    place.unlink()
    place.mkdir()
    ckpt.save(1)
    assert ckpt.wait().ok


def test_a_folder_that_everybody_may_write_to_is_refused_with_the_remedy(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, **parts()) as ckpt:
        ckpt.save(1)
    folder.chmod(0o777)
    with pytest.raises(CheckpointError, match="everybody may write there; run `chmod o-w"):
        Checkpointer(folder, **parts()).restore()
    folder.chmod(0o755)
    assert Checkpointer(folder, **parts()).restore() == 1


def test_a_stage_folder_holds_the_snapshot_and_keeps_nothing(tmp_path):
    stage = tmp_path / "fast"
    stage.mkdir()
    with Checkpointer(tmp_path / "checkpoints", **parts(), stage_dir=stage) as ckpt:
        ckpt.save(1)
        assert list(stage.iterdir()) == []
    assert ckpt.outcome.staged > 0
    assert Checkpointer(tmp_path / "checkpoints", **parts()).restore() == 1


def test_a_snapshot_beyond_the_memory_budget_is_written_while_training_waits(tmp_path):
    ckpt = Checkpointer(tmp_path / "checkpoints", **parts())
    ckpt._engine._staging = Staging(limit=10)
    ckpt.save(1)
    outcome = ckpt.wait()
    assert "exceed the memory budget of 10 B" in outcome.notes[0]
    assert outcome.stalled == outcome.seconds
    assert Checkpointer(tmp_path / "checkpoints", **parts()).restore() == 1


def test_time_is_turned_into_steps_that_follow_the_pace():
    now = [0.0]
    interval = EverySeconds(lambda: 60.0, Together(0, 1, None), clock=lambda: now[0])
    saves = []
    for step in range(1, 400):
        now[0] += 1.0 if step < 200 else 3.0
        if interval.due(step):
            saves.append(now[0])
    assert len(saves) == 13
    assert all(57 <= b - a <= 66 for a, b in pairwise(saves))
    assert [n for n in range(1, 9) if EverySteps(3).due(n)] == [3, 6]
    assert not EverySteps(0).due(0)


def test_the_interval_that_pays_is_young_s_within_bounds():
    assert young(2.0, 3600.0) == 120.0
    assert pays(2.0, 10.0, 3600.0) == 120.0
    assert pays(2.0, 90.0, 3600.0) == 180.0
    assert pays(0.0, 0.1, 60.0) == 30.0
    assert pays(600.0, 1.0, 1e9) == 7200.0
    assert pays(None, None, 3600.0) == young(5.0, 3600.0)


def test_every_nth_and_the_best_stay_besides_the_newest():
    metas = {
        step: {"validation_loss": loss}
        for step, loss in ((10, 3.0), (20, 1.0), (30, float("nan")), (40, 1.0), (50, 2.0))
    }
    assert Retention(every=25).protected(metas) == {50}
    assert Retention(best=1).protected(metas) == {40}
    assert Retention(best=3).protected(metas) == {20, 40, 50}
    assert Retention(best=1, metric="-validation_loss").protected(metas) == {10}


def test_lustre_is_found_by_the_longest_mount_and_striped_by_its_own_tool(tmp_path, monkeypatch):
    mounts = (
        "/dev/a / ext4 rw 0 0\nmds@tcp:/fs /scratch lustre rw 0 0\nt /scratch/tmp tmpfs rw 0 0\n"
    )
    assert is_lustre(Path("/scratch/me/runs"), mounts)
    assert not is_lustre(Path("/scratch/tmp/runs"), mounts)
    assert not is_lustre(Path("/scratchy"), mounts)
    assert setstripe_command(Path("/s/d")) == ["lfs", "setstripe", "--stripe-count", "1", "/s/d"]
    tool = tmp_path / "lfs"
    tool.write_text('#!/bin/sh\necho "$@" >> "$0.log"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hpcrun.checkpoint.lustre.is_lustre", lambda *_: True)
    stripe(tmp_path)
    assert (tmp_path / "lfs.log").read_text() == f"setstripe --stripe-count 1 {tmp_path}\n"
