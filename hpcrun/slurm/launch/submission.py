"""The executor of a run, a preview of its job, and the state of a run that has no job.

Rank 0 of a run that a person started by hand records its process in the run's event log. Nothing restarts
such a run, so its state is that of the process.
"""

import shutil
import socket
from typing import TYPE_CHECKING

from hpcrun import slurm
from hpcrun.config import Config
from hpcrun.errors import LaunchError
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Cause, Ended, Opened
from hpcrun.run.journal.journal import Journal, Reader, read_state
from hpcrun.slurm.launch.batch_script import batch_request, batch_script, submitted_digest
from hpcrun.slurm.launch.resources import refuse_fixed_counts
from hpcrun.slurm.launch.submitted import ExecutorName
from hpcrun.slurm.local.submission import local_devices, say_ignored, worker

if TYPE_CHECKING:
    import psutil


def choose_executor(config: Config) -> ExecutorName:
    """Return the executor that the config names, or with ``auto`` Slurm if Slurm is configured here.

    Raises:
        LaunchError: there are fewer GPUs than ranks, spare nodes without Slurm, or an option that fixes the
            nodes of a range.
    """
    wanted = config.job.executor
    if wanted == "auto":
        wanted = "slurm" if slurm.configured() else "local"
        if wanted == "local" and shutil.which("sbatch") is not None:
            say_aside(
                "hpcrun: Slurm is installed but not configured here; the job runs on this machine"
            )
    if wanted != "slurm" and config.job.spares:
        raise LaunchError(
            f"job.spares: {config.job.spares}: this machine is the only node, so none can replace "
            "another; use --spares 0, or submit to Slurm"
        )
    if config.job.elastic or config.job.spares:
        refuse_fixed_counts(config.job)
    if wanted == "local":
        local_devices(config)
        say_ignored(config.job)
    return wanted


def preview(run: RunDirectory, config: Config, executor: ExecutorName) -> str:
    """Return what a submission would send: the batch script, or the local cluster's plan as comments."""
    if executor in ("slurm", "prepared"):
        from hpcrun.slurm.launch.slurm_submission import bad_nodes, fitted_to_slurm

        fitted, digest = fitted_to_slurm(config), submitted_digest(config)
        return batch_script(batch_request(run, fitted, bad_nodes(config.job), submitted=digest))
    request = batch_request(run, config, submitted=submitted_digest(config))
    job = config.job
    lines = [
        f"# {executor}: {job.max_nodes} x {job.tasks_on_node} processes on this machine, each running",
        f"#   {' '.join(worker(run, job))}",
        "# With Slurm, this script would go to sbatch:",
        "",
    ]
    return "\n".join(lines) + batch_script(request)


def own_cluster() -> str | None:
    """Return the name of this host's cluster; None: no answer. A line names an old Slurm."""
    shown = slurm.show_config()
    if (version := slurm.parse_old_version(shown)) is not None:
        say_aside(
            f"hpcrun: Slurm {version} is older than {slurm.OLDEST}: restarts and causes of failures may be "
            "wrong; ask your site for a newer Slurm"
        )
    return slurm.parse_cluster_name(shown)


# The clocks of a process's start and of the event log may differ by this many seconds.
_SLACK = 2.0


def process_state(run: RunDirectory, read: Reader = read_state) -> tuple[str, str]:
    """Return ``RUNNING`` or nothing, and a detail, for the attempt that opened ``run`` last."""
    state = read(run)
    opened = state.newest(Opened)
    if opened is None:
        return "", ""
    if _is_elsewhere(opened):
        if any(end.attempt == opened.attempt for end in state.of_kind(Ended)):
            return "", ""
        return "RUNNING", f"on {opened.host}, according to its files"
    return ("RUNNING", "in the terminal that started it") if _process(opened) else ("", "")


def write_off(run: RunDirectory) -> str | None:
    """Record the end of an attempt on another host, which is gone; return that host, or None for this host.

    A process that runs there after all stops writing once another attempt has the run.
    """
    journal = Journal(run)
    opened = journal.read().newest(Opened)
    if opened is None or not _is_elsewhere(opened):
        return None
    host = str(opened.host)
    ended = Ended(
        attempt=opened.attempt,
        cause=Cause.NODE_FAILURE.value,
        reason=f"{host} is gone, as a person says",
        restart_allowed=False,
    )
    journal.append(ended)
    return host


def _is_elsewhere(opened: Opened) -> bool:
    return opened.host != socket.gethostname()


def _process(opened: Opened) -> "psutil.Process | None":
    """Return rank 0's process, or None after its end; a process younger than its event reuses the pid."""
    import psutil

    if opened.pid is None:
        return None
    try:
        process = psutil.Process(opened.pid)
        alive = process.status() != psutil.STATUS_ZOMBIE
        return process if alive and process.create_time() <= opened.time + _SLACK else None
    except (psutil.Error, ValueError):
        return None
