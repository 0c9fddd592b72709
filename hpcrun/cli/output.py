"""Output of the program: JSON on one line, and text that every terminal can show."""

import json
from collections.abc import Container, Sequence

from tqdm.utils import disp_len

from hpcrun import exit_codes
from hpcrun.api.logs import last_attempt
from hpcrun.api.places import handle
from hpcrun.diagnose.causes import first_cause
from hpcrun.job.scheduler_view import batch_log
from hpcrun.printing import quoted, say
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import read_exits, read_failures, read_hang
from hpcrun.run.files import finite, read_json
from hpcrun.run.journal.journal import Journal
from hpcrun.run.progress_lines import result_lines
from hpcrun.slurm.launch import jobs


def print_json(value: object) -> None:
    """Print ``value`` on one line. JSON (RFC 8259) has no NaN and no infinity, so they become null."""
    say(json.dumps(finite(value), ensure_ascii=True, allow_nan=False))


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return a line for each of ``rows``, with its cells in columns.

    Args:
        right: the columns whose cells are aligned at their right end.
    """
    widths = [max(map(disp_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = []
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            blank = " " * (width - disp_len(cell))
            padded.append(blank + cell if index in right else cell + blank)
        lines.append("  ".join(padded).rstrip())
    return lines


def plural(number: int, noun: str) -> str:
    """Return ``1 run`` or ``1,200 runs``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_CAUSES = {"bad-input": exit_codes.BAD_INPUT, "save-failed": exit_codes.SAVE_FAILED}


def print_result(run: RunDirectory) -> None:
    """Print a finished run's figures."""
    say(*result_lines(run))


def print_end(run: RunDirectory) -> int:
    """Print the end of ``run``, cause first, and return the matching exit code."""
    result = read_json(run.result)
    if result is None and not run.exists():
        say(f"hpcrun: {run.name} has ended: its run directory, {run.path}, was deleted")
        return exit_codes.FAILED
    if result is None:
        now = jobs.state(run)
        if now.word != "cancelled":
            why = now.detail.removesuffix("; `hpcrun resume` continues it")
            say(f"hpcrun: {run.name} ended without a result: {why}; {_continue(run)}")
            _print_evidence(run, None)
            return exit_codes.FAILED
        result = {"state": "cancelled", "step": Journal(run).read().committed}
    state, cause = str(result.get("state")), str(result.get("cause"))
    if state == "finished":
        say(f"hpcrun: {run.name} is finished")
        print_result(run)
        return exit_codes.DONE
    if state in ("cancelled", "stopped"):
        # The steps of a script are unknown.
        where = "" if result.get("step") is None else f" at step {result['step']}"
        say(f"hpcrun: {run.name} is {state}{where}; {_continue(run)}, and so does the same command")
        return exit_codes.UNFINISHED
    say(f"hpcrun: {run.name} failed: {result.get('reason')}")
    _print_evidence(run, cause)
    return _CAUSES.get(cause, exit_codes.FAILED)


def _continue(run: RunDirectory) -> str:
    return f"`hpcrun resume {handle(run)}` continues it"


def _print_evidence(run: RunDirectory, ended: str | None) -> None:
    attempt = last_attempt(run)
    if attempt is None:
        return
    folder = run.attempt_logs(attempt)
    # Only the rank that the reason names: tracebacks of other ranks show lost connections.
    cause = first_cause(
        read_failures(folder),
        read_exits(folder),
        batch_log(run, attempt),
        read_hang(folder),
        folder,
    )
    # If rank 0 refused the input, the line suffices: other ranks only lost their connection.
    if cause is not None and cause.traceback and (ended != "bad-input" or cause.bad_input):
        last = cause.traceback.rstrip().rpartition("\n")[2]
        if ended != "bad-input" or not last.startswith("hpcrun."):
            # Not for a refusal of hpcrun, which the line before has with the place of the call.
            say(*quoted(cause.traceback))
        if cause.copy:
            say(f"  copy  {cause.copy} (read-only copy of the submitted code; edit the original)")
    say(f"  logs  {folder}")
