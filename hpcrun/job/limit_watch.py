"""Kill the ranks of a packed run that does not stop before the time limit of the job.

At the limit Slurm kills the ranks and then the batch script, which could no longer requeue the job for the
other runs. So the ranks that still run shortly before the limit are killed here.
"""

import threading
import time

from hpcrun import slurm
from hpcrun.job.end.scheduler_view import query_job
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt

# Seconds. Enough to record the end of the run and to requeue the job on a busy node.
_EARLY = 20.0
_AGAIN = 5.0


class LimitWatch:
    """Kills the ranks of ``run`` shortly before ``end_time``; ``killed`` is true after that.

    Args:
        attempt: the start of the job.
        end_time: of the job, in Unix seconds; None without a limit.
        lead: seconds before the limit at which the ranks get their warning.
    """

    def __init__(
        self, run: RunDirectory, attempt: Attempt, end_time: float | None, lead: float
    ) -> None:
        self.killed = False
        self._run, self._attempt, self._end = run, attempt, end_time
        self._early = min(_EARLY, lead / 2)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="time limit", daemon=True)

    def __enter__(self) -> "LimitWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._end is not None:
            if self._over.wait(max(self._end - self._early - time.time(), 0.0)):
                return
            view = query_job(self._attempt.job)
            # While Slurm ends a job for another reason, the job's end time is in the past.
            if view is not None and view.state == "RUNNING":
                if not self._is_near(view.end_time):
                    # An administrator has changed the limit.
                    self._end = view.end_time
                    continue
                self._kill()
            # A controller that does not answer enforces no time limit.
            if self._over.wait(_AGAIN):
                return

    def _is_near(self, end: float | None) -> bool:
        return end is not None and end - self._early <= time.time()

    def _kill(self) -> None:
        job = self._attempt.job
        listed = slurm.run(slurm.squeue_steps_command(job))
        for step in slurm.parse_steps(listed.stdout, self._run.path.name):
            answer = slurm.run(slurm.scancel_command(job, signal="KILL", step=step))
            if answer.returncode == 0:
                self.killed = True
                print("hpcrun: does not stop before the time limit: killed", flush=True)
