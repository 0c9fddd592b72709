"""``--executor debug``: one rank in this process, so that breakpoints and tracebacks are at hand."""

import os

from hpcrun.cluster.environment import scrub
from hpcrun.config import load_resolved
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.policy import Budgets
from hpcrun.lifecycle.settle import SchedulerWord, settle, write_final_word
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, record_event
from hpcrun.worker import train_here

_INTERRUPTED = 130


def run_here(run: RunDirectory) -> int:
    """Train ``run`` in this process and return its exit code."""
    for name in os.environ.keys() - scrub(os.environ).keys():
        del os.environ[name]
    attempt = Attempt(f"pid{os.getpid()}", 0)
    record_event(run, "submitted", executor="debug", job=attempt.job)
    try:
        code = train_here(run.path)
    except KeyboardInterrupt:
        _settle(run, attempt, _INTERRUPTED)
        raise
    _settle(run, attempt, code)
    if code == exitcodes.DONE:
        from hpcrun.cli.outcome import print_result

        print_result(run)
    return code


def _settle(run: RunDirectory, attempt: Attempt, code: int) -> None:
    """Write down how it ended, as the scheduler's end of the job does elsewhere."""
    budgets = Budgets(**load_resolved(run.config).restarts.model_dump())
    word: SchedulerWord | None = "cancelled" if code == _INTERRUPTED else None
    verdict = settle(run, attempt, code, budgets, scheduler=word)
    if verdict.decision.restart:
        reason = "the debug executor starts nothing again; `hpcrun resume` continues it"
        write_final_word(run, verdict.cause, verdict.line, reason, verdict.step)
