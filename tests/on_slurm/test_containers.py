"""Ranks in a real Apptainer on Slurm: the same bits after a preemption, a signal and a killed rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from tests.support import jobs

from . import images
from .cluster import PATIENCE, SlurmCluster
from .conftest import unavailable
from .training import ROOT, Bench

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
        "job.setup": json.dumps([images.setup(image)]),
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
    assert stopped.committed
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


@pytest.mark.slow
def test_sigterm_lets_the_ranks_in_an_image_save(bench: Bench, image: Path) -> None:
    run = submit(bench, "ended", in_image(image, **{"model.pause": 0.05, "checkpoint.every": 0}))
    with bench.held_at(run, 13):
        # Slurm signals all processes of the step, also those of the runtime.
        bench.slurm.run(["scancel", bench.job(run)])
        assert bench.wait_for_end(run) == "CANCELLED", bench.story(run)
    (stopped,) = jobs.events(run, "stopped")
    assert stopped.committed
    assert bench.causes(run) == ["cancelled"]


@pytest.mark.slow
def test_a_registry_image_is_pulled_once_for_all_attempts(bench: Bench, image: Path) -> None:
    port = 5057
    served = f"{sys.executable} {ROOT}/tests/on_slurm/registry.py {image.parent}/root {port}"
    setup = [
        f"{images.setup(image)} APPTAINER_NOHTTPS=true",
        # Only the first attempt finds the registry.
        f"[ $SLURM_RESTART_COUNT ] || {served} > /dev/null 2>&1 &",
        f"[ $SLURM_RESTART_COUNT ] || until (: < /dev/tcp/127.0.0.1/{port}) 2> /dev/null; do sleep 0.2; done",
    ]
    script = 'echo "$HPCRUN_RESTART $KEY"; [ "$HPCRUN_RESTART" = 1 ] || exit 75'
    overrides = in_image(image, **{"job.setup": json.dumps(setup), "job.env.KEY": "of the job"})
    overrides["job.image"] = f"127.0.0.1:{port}/train:1"
    bench.hpcrun(
        *("submit", "--name", "pulled", "--nodes", "1", "--gpus", "1", "--cpu", "--executor", "slurm"),
        *("--detach", "job.mem=1G", *(f"{key}={one}" for key, one in overrides.items())),
        *("--", "bash", "-c", script),
    )  # fmt: skip
    run = bench.run("pulled")
    assert bench.wait_for_end(run, 2 * PATIENCE) == "COMPLETED", bench.story(run)
    logs = "".join(path.read_text() for path in sorted(run.logs.glob("*/*/rank-00000.log")))
    shown = [line for line in logs.splitlines() if " of the " in line]
    assert shown == ["0 of the job", "1 of the job"]
    assert [path.name for path in run.path.glob("image*")] == ["image.sif"]


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
