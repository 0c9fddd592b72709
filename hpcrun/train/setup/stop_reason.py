"""Make the function that gives the loop this rank's reason to stop."""

import os
from collections.abc import Callable

from hpcrun.config import Config
from hpcrun.ranks.deadline import DeadlineWatch, JobEnd
from hpcrun.ranks.launchers import in_local_cluster, job_id
from hpcrun.ranks.signals import StopFlag, StopReason
from hpcrun.ranks.time_limit import end_time, query_end_time


def stop_reason(config: Config, flag: StopFlag, *, main: bool) -> Callable[[], StopReason]:
    """Return a function for the reason to stop: a signal, or (on rank 0, ``main``) the time limit."""
    deadline = _watch_deadline(config) if main else None

    def reason() -> StopReason:
        late = deadline is not None and deadline.due()
        return max(flag.reason, StopReason.DEADLINE if late else StopReason.NONE)

    return reason


def _watch_deadline(config: Config) -> DeadlineWatch:
    job = job_id(os.environ)

    def ask() -> float | None:
        # Ask Slurm first: the environment variable does not follow an extended limit.
        found = None if job is None or in_local_cluster(os.environ) else query_end_time(job)
        return found or end_time(os.environ)

    return DeadlineWatch(JobEnd(ask, lead=float(config.job.signal_lead)))
