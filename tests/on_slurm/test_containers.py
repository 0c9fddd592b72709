"""Ranks in a real Apptainer on Slurm: the same bits after a preemption, a signal and a killed rank."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.run.files import read_json
from tests import jobs

from . import images
from .cluster import SlurmCluster
from .conftest import unavailable
from .training import Bench

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def image(slurm: SlurmCluster) -> Path:
    if not images.PREFIX.is_dir():
        unavailable("run `tools/devcluster install --apptainer`", features=["apptainer"])
    return images.build(slurm)


def in_image(image: Path, **changes: object) -> dict[str, object]:
    """Return overrides for a run in the image, which has neither torch nor hpcrun."""
    return {
        "job.image": str(image),
        "job.mounts": json.dumps(images.MOUNTS),
        "job.setup": json.dumps([images.SETUP]),
        "job.env.PYTHONPATH": "/hpcrun:/packages",
        "job.exclude_after": "null",
        **changes,
    }


def submit(bench: Bench, name: str, overrides: dict[str, object]) -> RunDirectory:
    return bench.submit(name, **{key.replace(".", "__"): one for key, one in overrides.items()})


@pytest.mark.slow
def test_interruptions_in_an_image_change_no_bit(
    bench: Bench, image: Path, calm: RunDirectory
) -> None:
    run = submit(bench, "boxed", in_image(image, **{"model.pause": 0.05, "job.preflight": "true"}))
    with bench.held_at(run, 13):
        bench.hpcrun("preempt", "boxed")
    bench.wait_for_step(run, 25, restart=1)
    with bench.held_at(run, 25, restart=1):
        (pid,) = bench.pids(run, 1)
        os.kill(pid, signal.SIGKILL)
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert bench.causes(run) == ["preemption", "crash", "finished"], bench.story(run)
    # The crash restarts in place, and not by a requeue.
    assert bench.slurm.restarts(bench.job(run)) == 1
    (stopped,) = jobs.events(run, "stopped")
    assert stopped.fields["committed"]
    assert jobs.final_state(run) == jobs.final_state(calm)
    for rank in range(2):
        mine = jobs.samples_by_step(run, bench.folder, rank, accumulation=2)
        assert mine == jobs.samples_by_step(calm, calm.path.parents[1], rank, accumulation=2)
    report = read_json(run.attempt_logs(Attempt(bench.job(run), 0)) / "preflight.json") or {}
    (contents,) = [one["words"] for one in report["results"] if one["check"] == "image"]
    assert contents.startswith(f"equal: contents {images.NAME}, torch ")
    assert report["fit"], report["results"]


def test_the_ranks_are_inside_and_the_batch_step_is_outside(bench: Bench, image: Path) -> None:
    script = "import os, sys, hpcrun; hpcrun.report(1, saved=True); print(sys.executable, os.environ['NAME'])"
    bench.hpcrun(
        *(
            "submit",
            "--name",
            "script",
            "--nodes",
            "1",
            "--gpus",
            "1",
            "--cpu",
            "--executor",
            "slurm",
        ),
        *("--detach", "job.mem=1G", "job.env.NAME=a, b"),
        *(f"{key}={one}" for key, one in in_image(image).items()),
        *("--", "bash", "-c", f'cat /etc/os-release; exec python3 -c "{script}"'),
    )
    run = bench.run("script")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    log = (run.attempt_logs(Attempt(bench.job(run), 0)) / "rank-00000.log").read_text()
    assert images.NAME in log
    assert "/usr/bin/python3 a, b" in log
    assert images.NAME not in bench.batch_log(run)


def test_a_missing_runtime_is_named_in_one_line(bench: Bench, image: Path) -> None:
    run = submit(bench, "bare", in_image(image, **{"job.setup": "[]"}))
    assert bench.wait_for_end(run) == "FAILED", bench.story(run)
    assert bench.result(run)["reason"] == (
        "the ranks cannot be started: apptainer or singularity: No such file or directory "
        "(job.python, job.image, job.container); fix the input and start it again"
    )


@pytest.mark.slow
def test_a_mount_that_is_missing_on_the_node_is_named(bench: Bench, image: Path) -> None:
    mounts = json.dumps([*images.MOUNTS, "/nowhere"])
    run = submit(bench, "unmounted", in_image(image, **{"job.mounts": mounts, "restarts.crash": 0}))
    assert bench.wait_for_end(run) == "FAILED", bench.story(run)
    told = bench.hpcrun("doctor", "unmounted", check=False).stdout
    assert "/nowhere" in told
    assert "job.mounts" in told
