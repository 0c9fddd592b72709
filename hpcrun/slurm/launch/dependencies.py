"""Start a run only after other runs have finished: Slurm's dependencies, and those of the local cluster."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcrun import slurm
from hpcrun.config import Config
from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory
from hpcrun.run.io.files import read_json
from hpcrun.slurm.launch import jobs
from hpcrun.slurm.launch.poll_interval import pauses

_POLL = 1.0


def unfinished_runs(
    runs: Sequence[RunDirectory], executor: str, cluster: str | None = None
) -> list[RunDirectory]:
    """Return those of ``runs`` that have not finished yet.

    Args:
        executor: the executor of the waiting job.
        cluster: the Slurm cluster that the job names; None: this host's cluster.

    Raises:
            LaunchError: a run has no job and so never finishes, or the job cannot wait for it there.
    """
    waiting = []
    for run, now in zip(runs, jobs.states(runs), strict=True):
        if _finished(run) and not now.live:
            continue
        if not now.live:
            raise LaunchError(
                f"--after {run.name}: has not finished and does not run ({now.word}); continue it first "
                f"with `hpcrun resume {run.name}`, or submit without --after"
            )
        if executor == "debug" or (now.executor == "slurm") != (executor in ("slurm", "prepared")):
            raise LaunchError(
                f"--after {run.name}: runs on {now.executor}, where a job of {executor} cannot wait for "
                "it; choose the same --executor"
            )
        there = now.cluster or now.through
        if now.executor == "slurm" and there != cluster and there != _elsewhere(cluster):
            raise LaunchError(
                f"--after {run.name}: runs on {_called(there)}, and a job on {_called(cluster)} cannot wait "
                "for a job of another cluster; submit to the same cluster, or without --after"
            )
        waiting.append(run)
    return waiting


def _elsewhere(cluster: str | None) -> str | None:
    """Return the cluster, or None if it is the cluster of this host."""
    return None if cluster == slurm.cluster_name() else cluster


def _called(cluster: str | None) -> str:
    return "this host's cluster" if cluster is None else f"cluster {cluster}"


def with_dependency(config: Config, runs: Sequence[RunDirectory]) -> Config:
    """Return ``config`` with a Slurm job that starts when the jobs of ``runs`` have ended with exit code 0.

    A requeued job has not ended, so its restarts are waited for (sbatch(1), --dependency). If a job
    fails, the waiting job is cancelled; otherwise it would wait forever.
    """
    if not runs:
        return config
    given = [job for run in runs if (job := jobs.current_job(run))]
    depends = "--dependency=" + ",".join(f"afterok:{job}" for _, job in given)
    options = [*config.job.sbatch_args, depends, "--kill-on-invalid-dep=yes"]
    return config.model_copy(update={"job": config.job.model_copy(update={"sbatch_args": options})})


def wait_for_runs(paths: Sequence[str], given_up: Callable[[], bool]) -> str | None:
    """Wait until the runs at ``paths`` have finished; return None, or the reason why they never will.

    Args:
        given_up: returns True if the waiting job was cancelled.
    """
    for run in map(RunDirectory, map(Path, paths)):
        executor, _ = jobs.current_job(run) or (None, "")
        pause = pauses(executor, _POLL)
        while jobs.state(run).live:
            if given_up():
                return "cancelled while it waited"
            time.sleep(next(pause))
        if not _finished(run):
            return f"{run.name}, which it waited for, has not finished"
    return None


def _finished(run: RunDirectory) -> bool:
    return (read_json(run.result) or {}).get("state") == "finished"
