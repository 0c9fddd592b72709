"""A rank that raises an exception in a step: its peers end without help from a scheduler."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from acceptancelib.outcome import REPORT, Job, Outcome, needs_gpu
from acceptancelib.runs import environment, submit
from hpcrun.run.directory import RunDirectory

SOON = 20.0
"""Seconds within which the peers must end: the watchdog looks every five seconds."""

_RUN_ON = 60.0
"""Seconds after the failure at which peers that still run are killed."""


def check(job: Job) -> list[Outcome]:
    """Start the ranks of a prepared run, and measure the time from the exception to the last end."""
    if job.gpus == 1:
        return [needs_gpu("failed rank", "two GPUs")]
    raised = job.place / "raised"
    plan = {"model__raise_at": 5, "model__raised": str(raised)}
    run = submit(job, "failing", "--prepare", **plan)
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += (_start(job, run, rank) for rank in range(job.ranks))
        ends = _watch(started, raised, 0.95 * job.seconds)
    finally:
        for process in started:
            process.kill()
            process.wait()
    if not raised.is_file():
        text = (job.place / f"failing-{job.ranks - 1}.log").read_text(errors="replace").strip()
        last = (text.splitlines() or ["no output"])[-1]
        return [
            Outcome(
                "failed rank", "fail", f"the ranks ended before the planted failure: {last}", REPORT
            )
        ]
    at = float(raised.read_text())
    return [judge([None if end is None else end - at for end in ends])]


def judge(seconds: list[float | None]) -> Outcome:
    """Return the outcome from the seconds between the exception and each rank's end; None: no end."""
    details: dict[str, Any] = {"seconds": seconds}
    running = [rank for rank, end in enumerate(seconds) if end is None]
    if running:
        line = f"{len(running)} of {len(seconds)} ranks still ran {_RUN_ON:.0f} s after a peer had failed"
        return Outcome("failed rank", "fail", line, REPORT, details)
    slowest = max(end for end in seconds if end is not None)
    line = (
        f"all {len(seconds)} ranks had ended {slowest:.1f} s after one of them raised an exception"
    )
    if slowest > SOON:
        return Outcome("failed rank", "fail", f"{line}, not within {SOON:.0f} s", REPORT, details)
    return Outcome("failed rank", "pass", line, details=details)


def _start(job: Job, run: RunDirectory, rank: int) -> "subprocess.Popen[bytes]":
    """Start a rank as a task of the local cluster, without its controller, which would kill the peers."""
    placed = {
        "HPCRUN_LOCAL_CLUSTER": "1",
        "SLURM_JOB_ID": "acceptance",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "local0",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(job.ranks),
        "SLURM_STEP_TASKS_PER_NODE": str(job.ranks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_RESTART_COUNT": "0",
    }
    with Path(job.place / f"failing-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "hpcrun.worker", str(run.path)],
            cwd=job.folder, env=environment() | placed, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _watch(
    started: list["subprocess.Popen[bytes]"], raised: Path, seconds: float
) -> list[float | None]:
    """Return the Unix time at which each process ended; None for those that did not."""
    ends: list[float | None] = [None] * len(started)
    late = time.time() + seconds
    while None in ends and time.time() < late:
        for rank, process in enumerate(started):
            if ends[rank] is None and process.poll() is not None:
                ends[rank] = time.time()
        if raised.is_file() and time.time() > raised.stat().st_mtime + _RUN_ON:
            break
        time.sleep(0.05)
    return ends
