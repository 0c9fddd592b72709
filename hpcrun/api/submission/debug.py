"""``--executor debug``: train one rank in this process, for breakpoints and tracebacks."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hpcrun.job.end.finalize import finalize
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, job_of_process, record_event
from hpcrun.slurm.environment import scrub
from hpcrun.worker import train_here

_INTERRUPTED = 130


def run_here(run: RunDirectory) -> int:
    """Train ``run`` in this process and return its exit code.

    Afterwards the environment and the signal handlers are restored.
    """
    before = dict(os.environ)
    try:
        with _same_handlers():
            return _run_here(run)
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _same_handlers() -> Iterator[None]:
    """Restore the signal handlers that the block has changed.

    Python sets handlers in the main thread only; in other threads this function does nothing.
    """
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                # None: C code installed the handler, and Python cannot restore it.
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _run_here(run: RunDirectory) -> int:
    for name in os.environ.keys() - scrub(os.environ).keys():
        del os.environ[name]
    attempt = Attempt(job_of_process(run, os.getpid()), 0)
    record_event(run, "submitted", executor="debug", job=attempt.job)
    try:
        return train_here(run.path)
    except KeyboardInterrupt:
        finalize(run, attempt, _INTERRUPTED, None, scheduler="cancelled")
        raise
