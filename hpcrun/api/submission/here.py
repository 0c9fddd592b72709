"""The training of a run in this process, for the executor ``debug``."""

import os
import signal
import threading
from importlib import import_module

from hpcrun.exit_codes import INTERRUPTED
from hpcrun.job.finalize import finalize
from hpcrun.job.scheduler_view import Ending
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Submitted
from hpcrun.run.journal.journal import Journal, job_of_process
from hpcrun.slurm.environment import scrub


def run_here(run: RunDirectory) -> int:
    """Train ``run`` in this process and return its exit code.

    Afterwards the environment and the signal handlers are restored.
    """
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        return _train_here(run)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        # Python sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                # None: C code installed the handler, and Python cannot restore it.
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _train_here(run: RunDirectory) -> int:
    for name in os.environ.keys() - scrub(os.environ).keys():
        del os.environ[name]
    attempt = Attempt(job_of_process(run, os.getpid()), 0)
    Journal(run).append(Submitted(attempt=attempt, executor="debug"))
    try:
        # The entry point of every rank, by name, as in the commands of the other executors.
        return int(import_module("hpcrun.worker").train_here(run.path))
    except KeyboardInterrupt:
        finalize(run, attempt, INTERRUPTED, None, Ending("cancelled"))
        raise
