"""How a run that has ended is told on the screen."""

from typing import Any

from hpcrun.api.log_files import last_attempt
from hpcrun.api.places import handle
from hpcrun.diagnose.causes import first_cause
from hpcrun.launch import jobs
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.end.batch_log import batch_log
from hpcrun.lifecycle.history import last_committed
from hpcrun.printing import quoted, say
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import read_exits, read_failures, read_hang
from hpcrun.run.events import Event, read_events
from hpcrun.run.figures import result_lines
from hpcrun.run.io.files import read_json
from hpcrun.run.leftovers import is_husk

_CAUSES = {"bad-input": exitcodes.BAD_INPUT, "save-failed": exitcodes.SAVE_FAILED}


def print_result(run: RunDirectory) -> None:
    """Print a finished run's figures."""
    say(*result_lines(run))


def print_end(run: RunDirectory) -> int:
    """Print how ``run`` ended, cause first, and return the exit code that says the same."""
    result = read_json(run.result)
    if result is None and (not run.path.is_dir() or is_husk(run.path)):
        say(f"hpcrun: {run.name} has ended: its run directory, {run.path}, was deleted")
        return exitcodes.FAILED
    if result is None:
        now = jobs.state(run)
        if now.word != "stopped":
            why = now.detail.removesuffix("; `hpcrun resume` continues it")
            say(f"hpcrun: {run.name} ended without a result: {why}; {_continue(run)}")
            _print_evidence(run, None)
            # Only a full disk keeps the controller, too, from a last word.
            return exitcodes.SAVE_FAILED if jobs.is_full(run.path) else exitcodes.FAILED
        result = {"state": "stopped", "step": last_committed(read_events(run))}
    state, cause = str(result.get("state")), str(result.get("cause"))
    if state == "finished":
        say(f"hpcrun: {run.name} is finished")
        print_result(run)
        return exitcodes.DONE
    if state == "stopped":
        say(
            f"hpcrun: {run.name} is stopped{_where(result)}; "
            f"{_continue(run)}, and so does the same command"
        )
        return exitcodes.UNFINISHED
    say(f"hpcrun: {run.name} failed: {result.get('reason')}")
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
    attempt = last_attempt(run)
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
    # Of input that rank 0 refused the line says all: whoever has a traceback was only left behind.
    if cause is not None and cause.traceback and (ended != "bad-input" or cause.bad_input):
        say(*quoted(cause.traceback))
        if cause.copy:
            say(f"  copy  {cause.copy} (read-only copy of the submitted code; edit the original)")
    say(f"  logs  {folder}")
