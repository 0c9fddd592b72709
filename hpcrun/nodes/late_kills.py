"""Requests of Slurm that come late, and end a rank on a node that has come back after its loss.

Slurm's controller repeats a request to a node that it cannot reach each minute, until the node answers or
is down (``_queue_agent_retry`` in slurmctld/agent.c). Two of them end processes of a later start of the job:

- the end of a step names only the job and the number of the step, and each start of a job numbers its steps
  from 0. So a start after a loss skips these numbers.
- the end of the job on a node that it gave up (``abort_job_on_nodes`` in slurmctld/job_mgr.c) names only the
  job. It ends the ranks and the agent there, once: this is no crash of the run, and no fault of the node.
"""

import os
import re
import time
from collections.abc import Sequence

from hpcrun import slurm
from hpcrun.diagnose.causes import Diagnosis
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Cause, Ended, Event, NodeLost, Opened, SpareLost
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import State
from hpcrun.slurm.environment import without_rank_requests
from hpcrun.slurm.notation import STEPS

# Slurm could reach all nodes at these ends.
_PLANNED = frozenset({Cause.PREEMPTION.value, Cause.TIME_LIMIT.value, Cause.CONTINUED.value})
# Seconds. A node counts as down after SlurmdTimeout (300 s by default), and Slurm then repeats nothing.
_LATE = 3600.0
_STEP = 30.0
# A node that does not answer is down long before, and a request that waits for it is then dropped.
_AFTER_LOSS = 600.0
_KILLED = re.compile(r"killed by SIGKILL|: Killed")
# A start of the job has at least the ranks' step and that of the agents.
_PER_START = 2


def numbers_to_skip(state: State, attempt: Attempt, now: float) -> int:
    """Return the number of steps from 0 on that a late request may kill; 0 after planned ends.

    Args:
        state: the run's state.
        attempt: the attempt that begins.
        now: Unix seconds.
    """
    starts: dict[int, list[Event]] = {}
    for event in state.events:
        one, recent = event.attempt, now - event.time < _LATE
        if recent and one is not None and one.job == attempt.job and one.restart < attempt.restart:
            starts.setdefault(one.restart, []).append(event)
    if not starts:
        return 0
    earlier = [starts.get(number, []) for number in range(min(starts), attempt.restart)]
    if not any(map(_was_unplanned, earlier)):
        return 0
    count = 0
    for told in earlier:
        numbers = [event.slurm_step for event in told if isinstance(event, Opened)]
        known = [number for number in numbers if number is not None]
        # The agents may have started after the ranks.
        count = max(known) + _PER_START if known else count + _PER_START
    return count


def _was_unplanned(events: Sequence[Event]) -> bool:
    """Return True if a node may have been lost in the start of the job with these events."""
    causes = [event.cause for event in events if isinstance(event, Ended)]
    lost = any(isinstance(event, NodeLost | SpareLost) for event in events)
    return lost or not causes or causes[-1] not in _PLANNED


def ended_late(state: State, attempt: Attempt, found: Diagnosis, now: float) -> bool:
    """Return True if Slurm may have ended a rank late: its node was lost in an earlier start of the job.

    Args:
        state: the run's state.
        attempt: the attempt that has ended.
        found: its first failure.
        now: Unix seconds.
    """
    if found.host is None or not _KILLED.search(found.line):
        return False
    lost = False
    for event in state.events:
        one = event.attempt
        if one is None or one.job != attempt.job:
            continue
        if one.restart == attempt.restart and event.cause == Cause.NODE_FAILURE.value:
            # Once is enough: a rank that is killed again and again needs the budget for crashes.
            return False
        recent = one.restart < attempt.restart and now - event.time < _AFTER_LOSS
        if recent and isinstance(event, NodeLost | SpareLost):
            lost |= event.host == found.host
    return lost


def skip_numbers(run: RunDirectory, attempt: Attempt) -> None:
    """Run empty steps on the node of this process, so that the steps of ``attempt`` get other numbers.

    Args:
        run: the run.
        attempt: the first attempt of this start of the job.
    """
    node = os.environ.get("SLURMD_NODENAME")
    if attempt.restart == 0 or node is None:
        return
    try:
        count = numbers_to_skip(Journal(run).read(), attempt, time.time())
    except OSError:
        # A file server that does not answer: the start of the ranks reports it.
        return
    environ = without_rank_requests(os.environ)
    for _ in range(count):
        # Without such a step the job is no worse off than before.
        if slurm.run(empty_step_command(node), timeout=_STEP, environ=environ).returncode != 0:
            return


def empty_step_command(node: str) -> list[str]:
    """Build the srun of a step that does nothing, and that waits for no resource of ``node``."""
    return [
        *("srun", "--overlap", "--mpi=none", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"),
        *(f"--nodelist={node}", "--mem=0", "--cpu-bind=none", "--immediate=10"),
        *(f"--job-name={STEPS}empty", "true"),
    ]
