"""The reasons why runs did not finish: the diagnosis of the logs, if the logs still exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun.diagnose.finding import FailureFinding, find_cause
from hpcrun.diagnose.run_lines import attempt_to_diagnose, lines_of_attempt, nodes_of
from hpcrun.results.report.runs import ReportedRun
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt

# Bytes to read of each log: the first failure of a rank is near the end of the log, or near its start.
_HEAD = _TAIL = 1 << 18
_MOST_FILES = 64


@dataclass(frozen=True)
class RunFailure:
    """The end of a run that did not finish.

    Args:
        finding: the diagnosis; None if the logs show no failure, or are gone.
        note: the reason for a missing finding; otherwise empty.
    """

    run: ReportedRun
    finding: FailureFinding | None
    note: str


def run_failures(runs: Iterable[ReportedRun]) -> list[RunFailure]:
    """Return the cause for each run that failed or has no result."""
    return [_run_failure(run) for run in runs if run.state in ("failed", "unfinished")]


def interruptions(runs: Iterable[ReportedRun]) -> Mapping[str, int]:
    """Return how many attempts ended by each cause, the most frequent first."""
    found = Counter(
        event.cause or "unknown" for run in runs for event in run.events if event.what == "ended"
    )
    return dict(found.most_common())


def _run_failure(run: ReportedRun) -> RunFailure:
    attempt = attempt_to_diagnose(run.events)
    directory = RunDirectory(Path(run.path))
    if attempt is None:
        return RunFailure(run, None, "no attempt has begun")
    if not directory.logs.is_dir():
        return RunFailure(run, None, "the logs are not on this machine")
    try:
        finding = _find(directory, attempt, run)
    except OSError as error:
        return RunFailure(run, None, f"the logs cannot be read: {error.strerror}")
    return RunFailure(run, finding, "" if finding else _without_finding(run))


def _find(directory: RunDirectory, attempt: Attempt, run: ReportedRun) -> FailureFinding | None:
    lines = lines_of_attempt(
        directory, attempt, run.events, head=_HEAD, tail=_TAIL, most_files=_MOST_FILES
    )
    return find_cause(lines, nodes_of(run.events, attempt))


def _without_finding(run: ReportedRun) -> str:
    if run.state == "unfinished":
        return "no result yet: the run trains or waits, or it was ended without a trace"
    return "the logs show no failure"


def counts(runs: Sequence[ReportedRun]) -> Mapping[str, int]:
    """Return the number of runs in each state, in a fixed order."""
    found = Counter(run.state for run in runs)
    order = ("finished", "cancelled", "stopped", "failed", "unfinished", "new")
    return {state: found[state] for state in order if found[state]}
