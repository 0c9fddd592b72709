"""Submission of the runs of a sweep that are missing or have failed."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from hpcrun.api.submission.handover import hand_over
from hpcrun.api.submission.run_list import RunList, RunToStart
from hpcrun.api.submission.undo import put_back_on_failure
from hpcrun.api.sweeps.plan import Planned, SweepPlan
from hpcrun.run.directory import RunDirectory
from hpcrun.run.sweep_file import NAME, SweepFile, write_sweep
from hpcrun.slurm.launch.submitted import SubmittedJob


@dataclass(frozen=True)
class SubmittedSweep:
    """Result of a submission: the decision on each element, and the jobs."""

    planned: Sequence[Planned]
    jobs: Sequence[SubmittedJob]


def submit_sweep(plan: SweepPlan) -> SubmittedSweep:
    """Submit the elements of the sweep that are missing or have failed.

    Raises:
        OSError: the folder cannot be written; nothing has changed.
        UserError: another process submits the sweep now, an element is a run of another config, or the
            scheduler refuses; nothing has changed.
        KeyboardInterrupt: Ctrl-C or SIGTERM during the call; nothing has changed, or the text names the
            jobs that stay.
    """
    sweep, planned = SweepFile(plan.folder, []), list[Planned]()

    def choose() -> Sequence[RunToStart]:
        nonlocal sweep, planned
        sweep, planned = plan.decided()
        return [one.to_start for one in planned if one.submitted]

    jobs = hand_over(run_list(plan, choose, lambda: _listed(sweep)))
    return SubmittedSweep(planned, jobs)


def run_list(
    plan: SweepPlan,
    choose: Callable[[], Sequence[RunToStart]],
    listed: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> RunList:
    """Return the input of the hand-over for ``plan``; ``choose`` and ``listed`` as in `RunList`."""
    folder = RunDirectory(plan.folder)
    return RunList(plan.request, folder, plan.executor, choose, listed=listed, code=plan.code)


@contextmanager
def _listed(sweep: SweepFile) -> Iterator[None]:
    """Write the new elements to ``sweep.json`` first: after a crash, the missing elements are known."""
    path = sweep.folder / NAME
    new = not path.exists()
    try:
        with put_back_on_failure(path):
            write_sweep(sweep)
            yield
    except BaseException:
        if new:
            shutil.rmtree(RunDirectory(sweep.folder).logs, ignore_errors=True)
            for made in sweep.folder.glob("uncommitted-*.patch"):
                made.unlink(missing_ok=True)
        raise
