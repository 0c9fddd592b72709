"""The command of a run in place of a task: what its launcher and time limits are."""

import os
import signal
import sys
from pathlib import Path

from hpcrun.config import Config
from hpcrun.config.commands.command import Launcher, launching_python
from hpcrun.devices.devices import missing_driver
from hpcrun.errors import UserError
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.script.run import ScriptTerms, run_script
from hpcrun.ranks.signals import StopFlag
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.snapshot import recorded_snapshot, snapshot_command
from hpcrun.train.environment import prepare_environment


def run_command(
    config: Config,
    run: RunDirectory,
    attempt: Attempt,
    distributed: DistributedConfig,
    flag: StopFlag,
) -> int:
    """Run ``config.command`` until it ends or must stop; return the exit code (see exit_codes)."""
    launcher = _launcher(config, distributed)
    command = _as_submitted(run, config.command, launcher)
    # The ranks that a task starts inherit its variables.
    if distributed.local_rank == 0 and not config.job.cpu and (line := missing_driver(os.environ)):
        print(f"hpcrun: {line}", file=sys.stderr, flush=True)
    started = max(1, config.job.gpus // config.job.tasks_on_node)
    prepare_environment(distributed, bind=False, started=started)
    return run_script(command, run, attempt, distributed, flag, _terms(config), launcher)


def _launcher(config: Config, distributed: DistributedConfig) -> Launcher | None:
    """Return the launcher of the command's ranks; raises UserError if the ranks are already started."""
    job = config.job
    if job.launcher is None:
        return None
    if distributed.launch_method == "torchrun":
        raise UserError(
            f"job.launcher: {job.launcher}, but torchrun has started this rank already; submit the run with "
            "`hpcrun submit`, or with sbatch/train.sbatch"
        )
    return Launcher(job.launcher, job.gpus, launching_python(job.python, job.launcher))


def _as_submitted(run: RunDirectory, command: list[str], launcher: Launcher | None) -> list[str]:
    """Return the command with the snapshot's copies in place of the files that it names."""
    snapshot = recorded_snapshot(run)
    if snapshot is None:
        return command
    before = [launcher.python] if launcher else []
    words, variables = snapshot_command(snapshot, [*before, *command], Path.cwd())
    os.environ.update(variables)
    return words[len(before) :]


def _terms(config: Config) -> ScriptTerms:
    """Return the time limits and the signal for the script."""
    job = config.job
    return ScriptTerms(
        timeout=config.train.timeout,
        # If the scheduler gives less time, it ends the script earlier.
        grace=max(float(job.signal_lead), float(job.kill_wait), job.grace),
        warning=signal.Signals[f"SIG{config.warn_signal}"],
        interface=job.interface,
        zero_finishes=job.zero_after_signal == "finished",
        silent_after=job.silent_after,
    )
