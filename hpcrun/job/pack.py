"""The batch step of a job that several runs share: one step of each run, and one requeue for all."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from hpcrun.job import policy as exitcodes
from hpcrun.job.bad_nodes import exclude_bad_nodes
from hpcrun.job.ending import (
    EndedAttempt,
    cancelled_after_all,
    complain,
    continue_in_another_job,
    latest,
    reason_now,
    recorded_end,
)
from hpcrun.job.policy import Clock
from hpcrun.job.requeue import requeue
from hpcrun.job.srun import BatchJob, link_batch_log
from hpcrun.job.step import forget_begun, note_begun, take_over_variables
from hpcrun.job.stop_signals import go_on, on_stop_signals
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, note
from hpcrun.slurm.node_setup import die_with_parent

# Number of times that a killed batch step is started again, as in the batch script.
_AGAIN = 2


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
    note_begun(runs[0])
    code = _run_all(runs, job)
    forget_begun(runs[0])
    return code


def _run_all(runs: Sequence[RunDirectory], job: BatchJob) -> int:
    attempt = job.attempt
    print(f"hpcrun: attempt {attempt.owner} on {os.environ.get('SLURM_JOB_NODELIST')}", flush=True)
    steps = [(run, _started(run, attempt)) for run in runs if not run.result.exists()]
    codes = {run: _code(run, step, attempt) for run, step in steps}
    for run, code in codes.items():
        print(f"hpcrun: {run.name}: ended with exit code {code}", flush=True)
    # From here on no rank runs, and a signal must not end the programs that requeue the job.
    on_stop_signals(signal.SIG_IGN)
    again = [run for run, code in codes.items() if code == exitcodes.UNFINISHED]
    if not again:
        return max(map(abs, codes.values()), default=exitcodes.DONE)

    return start_pack_again(again, attempt, job.end_time)


def _code(run: RunDirectory, step: "subprocess.Popen[bytes] | None", attempt: Attempt) -> int:
    """Wait for the batch step of ``run``, and for another one if it is killed; return the exit code."""
    code = exitcodes.FAILED if step is None else step.wait()
    for _ in range(_AGAIN):
        if code >= 0 or (step := _started(run, attempt)) is None:
            break
        code = step.wait()
    return code


def _started(run: RunDirectory, attempt: Attempt) -> "subprocess.Popen[bytes] | None":
    """Start the batch step of ``run``; None if it cannot start; the other runs continue."""
    command = [sys.executable, "-m", "hpcrun", "batch", "--packed", str(run.path)]
    with contextlib.suppress(OSError):
        # Only this file has Slurm's reason for the end of the job.
        link_batch_log(run, attempt, "pack")
    try:
        with (run.logs / f"batch-{attempt.job}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # If this program is killed, another one starts them again.
                preexec_fn=die_with_parent,
            )
    except OSError as error:
        print(f"hpcrun: {run.name}: does not start: {error}", flush=True)
        return None


def start_pack_again(runs: Sequence[RunDirectory], attempt: Attempt, end_time: float | None) -> int:
    """Requeue the job that ``runs`` share and that must continue; return the batch script's exit code.

    Args:
        end_time: of the job, in Unix seconds; None without a limit.
    """
    clock = Clock()
    ended = {run: recorded_end(run, attempt.is_of_start) for run in runs}

    def failed(kind: str, words: str) -> None:
        for run in runs:
            note(run, "requeue-failed", attempt, cause=kind, reason=words)
        complain(f"not requeued yet: {words}")

    # A person may have cancelled one of the runs after its end.
    left = [run for run in runs if reason_now(run, attempt, None) != "cancelled"] or runs
    for run in set(runs).difference(left):
        cancelled_after_all(run, attempt, ended[run])
    runs, until = left, latest(end_time, clock)

    def asked() -> str | None:
        found = {reason_now(run, attempt, None) for run in runs}
        return found.pop() if len(found) == 1 else None

    became = requeue(attempt, failed, asked, until=until, clock=clock)
    if became == "cancelled":
        return max(cancelled_after_all(run, attempt, ended[run]) for run in runs)
    if became == "forbidden":
        return max(
            continue_in_another_job(run, attempt, ended[run], False, until, clock) for run in runs
        )
    if became != "requeued":
        return exitcodes.UNFINISHED
    _exclude_bad_nodes(attempt, {run: ended[run] for run in runs})
    return exitcodes.DONE


def _exclude_bad_nodes(
    attempt: Attempt, classified: Mapping[RunDirectory, EndedAttempt | None]
) -> None:
    """Exclude bad nodes from the waiting job, once for all of its runs."""
    ends = {run: end for run, end in classified.items() if end is not None}
    if not ends:
        return
    job = next(iter(ends.values())).job
    classifications = [end.classification for end in ends.values()]
    exclude_bad_nodes(
        [*ends], attempt, classifications, after=job.exclude_after, hours=job.exclude_hours
    )
