"""The end of a cancelled job: the longest time until its end, and its record."""

from hpcrun.config import load_resolved
from hpcrun.job.end.finalize import write_result
from hpcrun.job.history import last_committed
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Cause, read_events
from hpcrun.run.io.files import read_json


def time_to_end(run: RunDirectory) -> float:
    """Return the seconds within which a cancelled job of ``run`` ends, with a margin."""
    job = load_resolved(run.config).job
    return max(job.grace, float(job.kill_wait)) + 60.0


def note_end(run: RunDirectory) -> None:
    """Write the result of ``run`` after the end of its job, if there is no result yet.

    Raises:
        OSError: the run directory cannot be written.
    """
    if read_json(run.result) is None:
        # The job was waiting, or its batch script was killed: no other process writes a result.
        step = last_committed(read_events(run))
        write_result(run, Cause.CANCELLED, "", "cancelled; `hpcrun resume` continues it", step)
