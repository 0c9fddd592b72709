"""The batch step of a job that several runs share: one step of each run, and one requeue for all."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from hpcrun.job import exitcodes
from hpcrun.job.srun import link_batch_log
from hpcrun.job.step import forget_unstarted, go_on, on_stop_signals, take_over_variables
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt


def run_pack(runs: Sequence[RunDirectory]) -> int:
    """Run all ``runs`` in this job at the same time; return the exit code for the batch script.

    Each run has its own logs, budgets and end. A run with a result does not start. After the end of all
    runs, the job is requeued if one of them is to continue.

    Raises:
        UserError: this is no batch script.
    """
    # Slurm signals all processes of the batch script: this process must outlive the ranks, which save.
    on_stop_signals(go_on)
    job = take_over_variables()
    attempt = job.attempt
    forget_unstarted(runs[0])
    print(f"hpcrun: attempt {attempt.owner} on {os.environ.get('SLURM_JOB_NODELIST')}", flush=True)
    steps = [(run, _started(run, attempt)) for run in runs if not run.result.exists()]
    codes = {run: exitcodes.FAILED if step is None else step.wait() for run, step in steps}
    for run, code in codes.items():
        print(f"hpcrun: {run.name}: ended with exit code {code}", flush=True)
    # From here on no rank runs, and a signal must not end the programs that requeue the job.
    on_stop_signals(signal.SIG_IGN)
    again = [run for run, code in codes.items() if code == exitcodes.UNFINISHED]
    if not again:
        return max(map(abs, codes.values()), default=exitcodes.DONE)
    from hpcrun.job.pack_end import start_pack_again

    return start_pack_again(again, attempt, job.end_time)


def _started(run: RunDirectory, attempt: Attempt) -> "subprocess.Popen[bytes] | None":
    """Start the batch step of ``run``; None if it cannot start; the other runs continue."""
    command = [sys.executable, "-m", "hpcrun", "batch", "--packed", str(run.path)]
    with contextlib.suppress(OSError):
        # Only this file has Slurm's reason for the end of the job.
        link_batch_log(run, attempt, "pack")
    try:
        with (run.logs / f"batch-{attempt.job}.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    except OSError as error:
        print(f"hpcrun: {run.name}: does not start: {error}", flush=True)
        return None
