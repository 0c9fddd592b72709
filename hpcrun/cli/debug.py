"""``--executor debug``: one rank in this process, so that breakpoints and tracebacks are at hand."""

import os

from hpcrun.cluster.environment import scrub
from hpcrun.lifecycle import exitcodes
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import record_event
from hpcrun.worker import train_here


def run_here(run: RunDirectory) -> int:
    """Train ``run`` in this process and return its exit code."""
    for name in os.environ.keys() - scrub(os.environ).keys():
        del os.environ[name]
    record_event(run, "submitted", executor="debug", job=f"pid{os.getpid()}")
    code = train_here(run.path)
    if code == exitcodes.DONE:
        from hpcrun.cli.outcome import print_result

        print_result(run)
    return code
