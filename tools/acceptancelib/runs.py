"""Whole runs, of ``acceptance_task.py`` or of a config, started by the ``hpcrun`` command in a folder."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acceptancelib.outcome import Job
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch import jobs

ROOT = Path(__file__).resolve().parents[2]
_TASK = Path(__file__).with_name("acceptance_task.py")

# The variables of an enclosing job or launcher would place the ranks.
_OUTER = ("SLURM_", "SBATCH_", "OMPI_", "PMI", "HPCRUN_")
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    """Return the environment without a launcher's variables, in which ``hpcrun`` can be imported."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OUTER) and name not in _LAUNCHER
    }
    paths = [str(ROOT), kept.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def settings(job: Job, **changes: Any) -> list[str]:
    """Return overrides for a short run on all GPUs; ``train__steps`` in ``changes`` is train.steps."""
    wanted: dict[str, Any] = {
        "task": "acceptance_task:Disturbed",
        "job.nodes": 1,
        "job.gpus": job.ranks,
        "job.cpu": job.simulated,
        "job.executor": "local",
        "job.requeue_delay": 0.1,
        "train.steps": 24,
        "train.batch_size": 4 * job.ranks,
        "train.accumulation": 2,
        "train.log_every": 1,
        "train.parallel": "ddp",
        "amp.dtype": "fp32" if job.simulated else "bf16",
        "checkpoint.every": 5,
    }
    wanted |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={it if isinstance(it, str) else json.dumps(it)}" for key, it in wanted.items()]


def submit(job: Job, name: str, *options: str, **changes: Any) -> RunDirectory:
    """Submit a run, or prepare it with the option ``--prepare``.

    Raises:
        RuntimeError: the command failed; with its last line.
    """
    shutil.copy(_TASK, job.folder)
    empty = job.place / "empty.yaml"
    empty.write_text("{}\n")
    return submit_config(job, name, empty, *options, *settings(job, **changes))


def submit_config(job: Job, name: str, config: Path, *words: str) -> RunDirectory:
    """Submit a run of ``config`` with options and overrides.

    Raises:
        RuntimeError: the command failed; with its last line.
    """
    _hpcrun(
        job, "submit", "-c", str(config), "--name", name, "--runs-dir", str(job.place / "runs"),
        "--profile", "", *words,
    )  # fmt: skip
    return RunDirectory(job.place / "runs" / name)


def wait_for_end(job: Job, run: RunDirectory, seconds: float) -> None:
    """Wait until no job owns the run; cancel it if that takes longer, or if this process is ended.

    Raises:
        TimeoutError: the run was canceled.
    """
    wait_for(job, run, lambda: False, seconds)


def wait_for(
    job: Job, run: RunDirectory, enough: Callable[[], bool], seconds: float, *how: str
) -> None:
    """Wait until ``enough()``, and then cancel the run with the options ``how``; or until its end.

    Raises:
        TimeoutError: the run was canceled, because neither happened within ``seconds``.
    """
    late, ended = time.monotonic() + seconds, False
    try:
        while not (ended := not jobs.state(run).live) and not enough():
            if time.monotonic() > late:
                raise TimeoutError(f"the run {run.name} did not end in {seconds:.0f} s")
            time.sleep(0.1)
    finally:
        if not ended:
            _hpcrun(job, "cancel", *how, str(run.path))


def _hpcrun(job: Job, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpcrun", *words],
        cwd=job.folder, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [""]
        raise RuntimeError(f"hpcrun {words[0]}: exit code {done.returncode}: {lines[-1][:200]}")
