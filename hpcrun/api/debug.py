"""``--executor debug``: one rank in this process, so that breakpoints and tracebacks are at hand."""

import os

from hpcrun.cluster.environment import scrub
from hpcrun.lifecycle.settle import settle_by_hand
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, record_event
from hpcrun.worker import train_here

_INTERRUPTED = 130


def run_here(run: RunDirectory) -> int:
    """Train ``run`` in this process and return its exit code; the environment is as before afterwards."""
    before = dict(os.environ)
    try:
        return _run_here(run)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_here(run: RunDirectory) -> int:
    for name in os.environ.keys() - scrub(os.environ).keys():
        del os.environ[name]
    attempt = Attempt(f"pid{os.getpid()}", 0)
    record_event(run, "submitted", executor="debug", job=attempt.job)
    try:
        return train_here(run.path)
    except KeyboardInterrupt:
        settle_by_hand(run, attempt, _INTERRUPTED, "cancelled")
        raise
