"""The batch step: everything that a batch script does, from its first line to its exit code."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpcrun import slurm
from hpcrun.devices.devices import GPU_JOB
from hpcrun.errors import UserError
from hpcrun.job import exitcodes
from hpcrun.job.inherited_variables import own_variables
from hpcrun.job.limit_watch import LimitWatch
from hpcrun.job.shell import Ended, run_ranks
from hpcrun.job.srun import (
    LaunchOptions,
    link_batch_log,
    node_setup_steps,
    preflight_steps,
    read_launch_options,
    sharing_node,
    srun_command,
    torchrun_command,
    torchrun_variables,
)
from hpcrun.ranks.launchers import job_id
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.run.io.files import HeldFolder, make_log_folder

if TYPE_CHECKING:
    from types import FrameType

# Seconds. Longer than a client of a network file system needs to mount again (autofs, a failover).
_MISSING_SECONDS = 30.0


@dataclass(frozen=True)
class Way:
    """The kind of batch script.

    ``own_script``: a person wrote it. ``torchrun``: one torchrun per node starts the ranks.

    ``packed``: other runs share the job; this step does not requeue it.
    """

    own_script: bool = False
    torchrun: bool = False
    packed: bool = False


@dataclass(frozen=True)
class BatchJob:
    """The start of a job that a batch script belongs to. ``end_time``: in Unix seconds, if there is one."""

    attempt: Attempt
    end_time: float | None


def run_step(run: RunDirectory, way: Way, failed: str | None = None, code: int = 1) -> int:
    """Run the job's part of ``run`` and return the exit code for the batch script.

    Args:
        failed: the command of a person's own batch script that failed before the ranks; no rank starts then.
        code: its exit code.

    Raises:
        UserError: this is no batch script, or there is no run.
    """
    # Slurm signals all processes of the batch script: this process must outlive the ranks, which save.
    on_stop_signals(go_on)
    job = take_over_variables()
    # Before any refusal: with the file, the batch script would take it for an interpreter that does not
    # start.
    forget_unstarted(run)
    if not _exists(run):
        raise UserError(
            f"{run.path}: no such run; make it with `hpcrun submit --prepare`; `hpcrun status` lists the runs"
        )
    attempt = job.attempt
    if not _has_own_number(run, attempt):
        return exitcodes.BAD_INPUT
    if way.own_script:
        _prepare_logs(run, attempt)
    print(f"hpcrun: attempt {attempt.owner} on {os.environ.get('SLURM_JOB_NODELIST')}", flush=True)
    if failed is None and _is_finished(run, attempt):
        print(f"hpcrun: {run.name} is finished: there is nothing left to train", flush=True)
        _send_left(run)
        return exitcodes.DONE
    _send_left(run)
    place = _held(run)
    ended = _start(run, job, way) if failed is None else Ended(code, failed)
    if _was_deleted(place, run):
        # A new run may have this name: this job must not write its log and its result.
        print(f"hpcrun: {run.path} was deleted while the job ran; the job ends", flush=True)
        return exitcodes.FAILED
    # From here on no rank runs, and a signal must not end the programs that requeue the job.
    on_stop_signals(signal.SIG_IGN)
    from hpcrun.job.ending import conclude

    return conclude(
        run,
        attempt,
        ended.code,
        setup=ended.failed,
        end_time=job.end_time,
        own_script=way.own_script,
        packed=way.packed,
        out_of_time=ended.out_of_time,
    )


def _send_left(run: RunDirectory) -> None:
    """Send the notifications of an attempt that lost its node before it could send them."""
    from hpcrun.job.notify.starting import send_left

    try:
        send_left(run)
    except OSError as error:
        print(f"hpcrun: {run.events}: {error.strerror}; notifications wait", flush=True)


def _start(run: RunDirectory, job: BatchJob, way: Way) -> Ended:
    attempt = job.attempt
    options = LaunchOptions() if way.own_script else read_launch_options(run)
    if way.packed:
        options = sharing_node(run, options)
    environ: Mapping[str, str] = os.environ
    command = srun_command
    env = dict(options.env)
    if options.gpus:
        env[GPU_JOB] = environ["SLURM_JOB_ID"]
    if way.torchrun:
        command = torchrun_command
        env = torchrun_variables(run, attempt, environ)
    try:
        make_log_folder(run.attempt_logs(attempt.job, attempt.restart))
        steps = [
            *node_setup_steps(run, attempt, options, environ),
            *preflight_steps(run, options),
            command(run, attempt, options, environ),
        ]
        if not way.packed:
            return run_ranks(options.setup, env, steps, environ)
        with LimitWatch(run, attempt, job.end_time, options.signal_lead) as watch:
            ended = run_ranks(options.setup, env, steps, environ)
        return replace(ended, out_of_time=watch.killed)
    except UserError as error:
        print(f"hpcrun: {error}", flush=True)
        return Ended(exitcodes.BAD_INPUT, None)
    except OSError as error:
        # The cause is this node or temporary, so another start may help.
        print(f"hpcrun: srun cannot be started: {error}", flush=True)
        return Ended(exitcodes.FAILED, None)


def take_over_variables() -> BatchJob:
    """Remove the variables of other jobs from this process's environment; return this start of the job."""
    number = os.environ.get("SLURM_JOB_ID")
    if number is None:
        raise UserError("batch: SLURM_JOB_ID is not set; batch scripts call this, not people")
    shown = slurm.run(slurm.scontrol_show_job_command(number))
    facts = slurm.parse_show_job(shown.stdout, number) if shown.returncode == 0 else {}
    own = own_variables(os.environ, facts)
    os.environ.clear()
    os.environ.update(own)
    attempt = Attempt(job_id(own) or number, int(own.get("SLURM_RESTART_COUNT") or 0))
    return BatchJob(attempt, slurm.unix_time(facts.get("EndTime", "Unknown")))


def _has_own_number(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if the job owns its log folder; print the refusal if it does not."""
    from hpcrun.job.ownership import Occupied, require_own_number

    try:
        require_own_number(run, attempt.job)
    except Occupied as taken:
        print(f"hpcrun: {taken}", flush=True)
        return False
    except OSError as error:
        # Without the file, only the owner's record distinguishes jobs of two clusters.
        print(f"hpcrun: {run.job_logs(attempt.job)}: {error.strerror}", flush=True)
    return True


def _prepare_logs(run: RunDirectory, attempt: Attempt) -> None:
    try:
        run.logs.mkdir(exist_ok=True)
        link_batch_log(run, attempt)
    except OSError as error:
        print(f"hpcrun: {run.logs}: {error.strerror}; Slurm's messages are not read", flush=True)


def forget_unstarted(run: RunDirectory) -> None:
    """Remove the file that shows the batch script that its interpreter does not start."""
    try:
        run.unstarted(os.environ["SLURM_JOB_ID"]).unlink(missing_ok=True)
    except OSError as error:
        print(
            f"hpcrun: {error.filename}: cannot be removed: {error.strerror}; remove it by hand",
            flush=True,
        )


def _held(run: RunDirectory) -> HeldFolder | None:
    """Return the identity of the run directory; None if the file server does not answer."""
    try:
        return HeldFolder(run.path)
    except OSError:
        return None


def _was_deleted(place: HeldFolder | None, run: RunDirectory) -> bool:
    """Return True if the run directory was deleted, and not only missing while its file system mounts."""
    if place is None:
        return False
    end = time.monotonic() + _MISSING_SECONDS
    while True:
        try:
            if place.is_there():
                return False
            if run.path.exists() or time.monotonic() > end:
                return True
        except OSError:
            return False
        time.sleep(1.0)


def _exists(run: RunDirectory) -> bool:
    try:
        return run.config.exists()
    except OSError:
        # A file server that does not answer is no proof of a deletion.
        return True


def _is_finished(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if an earlier start of this job has finished the run."""
    if attempt.restart == 0:
        return False
    from hpcrun.job.opening import already_finished

    try:
        return already_finished(run, attempt)
    except OSError:
        return False


def go_on(number: int, frame: "FrameType | None") -> None:
    """Handle a signal that the ranks have received as well."""


def on_stop_signals(handler: "Callable[[int, FrameType | None], None] | signal.Handlers") -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, handler)
