"""The states of several runs' jobs, with as few calls to Slurm as possible."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcrun import slurm
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Submitted
from hpcrun.run.journal.journal import Journal, Reader, read_state
from hpcrun.run.journal.state import State
from hpcrun.run.sweep_file import is_element
from hpcrun.slurm.answers import WAITING, reason_in_words
from hpcrun.slurm.notation import AGENTS

# squeue itself would try for 18 s; a person is waiting.
PATIENCE = 6.0


# One argument of a program holds 128 KiB (MAX_ARG_STRLEN, execve(2)): job ids of ten digits and a comma.
_MOST_JOBS = 10_000


@dataclass(frozen=True)
class SlurmAnswer:
    """The (state, reason for waiting) of each job that Slurm knows, and whether Slurm answered.

    ``starts``: the expected start of a job that waits, in Unix seconds.
    """

    known: dict[str, tuple[str, str]]
    answered: bool
    starts: Mapping[str, float] = field(default_factory=dict)


def slurm_states(
    asked: Sequence[tuple[RunDirectory, str]], read: Reader = read_state
) -> SlurmAnswer:
    """Ask Slurm for the jobs of these runs.

    Args:
        read: returns the state of a run by its journal.
    """
    if not asked:
        return SlurmAnswer({}, True)
    runs = {job: run for run, job in asked}
    found: dict[str, tuple[str, str]] = {}
    starts: dict[str, float] = {}
    others: set[str] = set()
    answered = True
    for jobs in _in_calls(runs):
        listed = slurm.run(slurm.squeue_command(jobs), timeout=PATIENCE)
        answered &= listed.returncode == 0 or slurm.is_unknown_job(listed)
        if listed.returncode != 0:
            continue
        for job, info in slurm.parse_squeue(listed.stdout).items():
            waits = info.state in WAITING
            if job not in runs:
                continue
            if _is_of_another(read(runs[job]), runs[job], job, info.name):
                others.add(job)
                continue
            found[job] = (info.state, reason_in_words(info.reason) if waits else "")
            if waits and info.start_time is not None:
                starts[job] = info.start_time
    missing = [job for job in runs if job not in found and job not in others]
    for jobs in _in_calls(missing):
        recorded = slurm.run(slurm.sacct_command(jobs), timeout=PATIENCE)
        if recorded.returncode == 0:
            for row in slurm.parse_sacct(recorded.stdout):
                if row.job_id in runs:
                    found[row.job_id] = (row.state, "")
    return SlurmAnswer(found, answered, starts)


def _in_calls(jobs: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of ids for one query; an array's id includes all its tasks."""
    ids = list(dict.fromkeys(job.partition("_")[0] for job in jobs))
    for begin in range(0, len(ids), _MOST_JOBS):
        yield ids[begin : begin + _MOST_JOBS]


def has_opened(run: RunDirectory, job: str) -> bool:
    """Return True if the ranks of the job's present start have opened the run.

    False if Slurm does not report the number of the start.
    """
    shown = slurm.run(slurm.scontrol_show_job_command(job), timeout=PATIENCE)
    restarts = slurm.parse_show_job(shown.stdout).get("Restarts", "")
    return restarts.isdecimal() and any(
        event.attempt is not None
        and event.attempt.job == job
        and event.attempt.restart >= int(restarts)
        for event in Journal(run).read().openings
    )


def kill_steps(job: str) -> bool:
    """Send SIGKILL to all steps of ``job``, except the agents; return whether a step received it.

    The batch script continues and records the end.
    """
    listed = slurm.run(slurm.squeue_steps_command(job))
    agents = slurm.parse_steps(listed.stdout, AGENTS)
    killed = [
        slurm.run(slurm.scancel_command(job, signal="KILL", step=step))
        for step in slurm.parse_steps(listed.stdout)
        if step not in agents
    ]
    return any(answer.returncode == 0 for answer in killed)


def _is_of_another(state: State, run: RunDirectory, job: str, name: str) -> bool:
    """Return True if the id now belongs to another job, as after a new installation of the cluster.

    Our job has the name that it was submitted with. One that a person has renamed still runs the script
    in the run directory.
    """
    names = [
        event.name
        for event in state.of_kind(Submitted)
        if event.attempt is not None and event.attempt.job == job
    ]
    if not name or not names or names[-1] in (None, name):
        return False
    shown = slurm.run(slurm.scontrol_show_job_command(job), timeout=PATIENCE)
    script = Path(slurm.parse_show_job(shown.stdout).get("Command", ""))
    # The script of an array is in the folder of its sweep.
    folder = run.path.parent if is_element(run) else run.path
    return shown.returncode == 0 and not script.resolve().is_relative_to(folder.resolve())
