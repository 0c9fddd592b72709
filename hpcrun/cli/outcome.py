"""How a run that has ended is told on the screen."""

from pathlib import Path
from typing import Any

from hpcrun.cli.runs import handle
from hpcrun.diagnose.causes import first_cause
from hpcrun.launch import jobs
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.batch_log import batch_log
from hpcrun.lifecycle.history import last_committed
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import read_exits, read_failures, read_hang
from hpcrun.run.events import Attempt, Event, read_events
from hpcrun.run.files import read_json
from hpcrun.run.leftovers import is_husk

_CAUSES = {"bad-input": exitcodes.BAD_INPUT, "save-failed": exitcodes.SAVE_FAILED}


def print_result(run: RunDirectory) -> None:
    """Print a finished run's report: numbers first, then texts of several lines."""
    result = read_json(run.result) or {}
    report = {key: _shown(value) for key, value in (result.get("report") or {}).items()}
    long = {key: value for key, value in report.items() if "\n" in value}
    short = {key: value for key, value in report.items() if key not in long}
    if "validation_loss" not in report and result.get("validation_loss") is not None:
        loss = (
            result["best"]["validation_loss"] if _of_the_best(result) else result["validation_loss"]
        )
        short["validation_loss"] = _shown(loss)
    if "stopped_early" in result:
        short["stopped_early"] = _shown(result["stopped_early"])
    if _told_apart(result):
        best = result["best"]
        mine, others = (
            ("; the figures are of it", "")
            if _of_the_best(result)
            else ("", "; the figures are of it")
        )
        short["best"] = (
            f"step {best['step']}, validation loss {_shown(best['validation_loss'])}{mine}"
        )
        short["last"] = (
            f"step {result['steps']}, validation loss {_shown(result['validation_loss'])}{others}"
        )
    if "report_error" in result:
        short["report"] = result["report_error"]
    width = max(map(len, short), default=0)
    for key, value in short.items():
        print(f"  {key.replace('_', ' '):<{width}}  {value}")
    for key, value in long.items():
        print(f"  {key.replace('_', ' ')}:")
        print("\n".join(f"    | {line}" for line in value.splitlines()))
    print(f"  {'result':<{width}}  {run.result}")


def _told_apart(result: dict[str, Any]) -> bool:
    """Whether another step than the last had the lowest validation loss."""
    return "best" in result and result["best"]["step"] != result.get("steps")


def _of_the_best(result: dict[str, Any]) -> bool:
    """Whether the report is of the weights with the lowest validation loss, and these are not the last."""
    return _told_apart(result) and result.get("report_step", result["steps"]) != result["steps"]


def _shown(value: Any) -> str:
    """A value of the report as text: a list of lists becomes a table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list) and len(value) > 1 and all(isinstance(row, list) for row in value):
        cells = [[_shown(cell) for cell in row] for row in value]
        width = max((len(cell) for row in cells for cell in row), default=0)
        return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in cells)
    return str(value)


def print_end(run: RunDirectory) -> int:
    """Print how ``run`` ended, cause first, and return the exit code that says the same."""
    result = read_json(run.result)
    if result is None and (not run.path.is_dir() or is_husk(run.path)):
        print(f"hpcrun: {run.name} has ended: its run directory, {run.path}, was deleted")
        return exitcodes.FAILED
    if result is None:
        now = jobs.state(run)
        if now.word != "stopped":
            print(f"hpcrun: {run.name} ended without a result: {now.detail}; {_continue(run)}")
            _print_evidence(run, None)
            # Only a full disk keeps the controller, too, from a last word.
            return exitcodes.SAVE_FAILED if jobs.is_full(run.path) else exitcodes.FAILED
        result = {"state": "stopped", "step": last_committed(read_events(run))}
    state, cause = str(result.get("state")), str(result.get("cause"))
    if state == "finished":
        print(f"hpcrun: {run.name} is finished")
        print_result(run)
        return exitcodes.DONE
    if state == "stopped":
        print(
            f"hpcrun: {run.name} is stopped{_where(result)}; "
            f"{_continue(run)}, and so does the same command"
        )
        return exitcodes.UNFINISHED
    print(f"hpcrun: {run.name} failed: {result.get('reason')}")
    _print_evidence(run, cause)
    return _CAUSES.get(cause, exitcodes.FAILED)


def _where(result: dict[str, Any]) -> str:
    """Nothing for a script, whose steps nobody counts."""
    step = result.get("step")
    return "" if step is None else f" at step {step}"


def _continue(run: RunDirectory) -> str:
    return f"`hpcrun resume {handle(run)}` continues it"


def describe_restart(event: Event) -> str:
    """One line on an attempt that ended and is followed by another."""
    reason, decision = event.fields.get("reason"), event.fields.get("decision")
    return f"hpcrun: {reason}; {decision}"


def _print_evidence(run: RunDirectory, ended: str | None) -> None:
    attempt = _last_attempt(run)
    if attempt is None:
        return
    folder = run.attempt_logs(attempt.job, attempt.restart)
    # Of the rank that the reason names: the others' tracebacks tell of lost connections.
    cause = first_cause(
        read_failures(folder),
        read_exits(folder),
        batch_log(run, attempt),
        read_hang(folder),
        folder,
    )
    # Of bad input the line says all: whoever has a traceback was only left behind.
    if cause is not None and cause.traceback and ended != "bad-input":
        print(cause.traceback.rstrip())
    print(f"  logs  {folder}")


def last_attempt_logs(run: RunDirectory) -> Path | None:
    """The log folder of the newest attempt, or None before the first."""
    attempt = _last_attempt(run)
    return None if attempt is None else run.attempt_logs(attempt.job, attempt.restart)


def _last_attempt(run: RunDirectory) -> Attempt | None:
    for event in reversed(read_events(run)):
        if event.attempt is not None and event.what != "submitted":
            return event.attempt
    return None
