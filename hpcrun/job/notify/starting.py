"""The start of the process that sends notifications (see ``sender``)."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass

from hpcrun.config import Watch
from hpcrun.job.notification import Due, due
from hpcrun.printing import say
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import read_events

# Seconds that a batch script without a next attempt waits for its sender; Slurm ends the sender after that.
PATIENCE = 60.0
# The local cluster's controller ends the processes with this variable at its end.
_MARKS = ("HPCRUN_LOCAL_JOB",)


@dataclass(frozen=True)
class Sender:
    """The sending process, which waits until :meth:`release`; ``process`` is None if it did not start."""

    process: "subprocess.Popen[bytes] | None"

    def release(self, unrecorded: Due | None = None) -> None:
        """Let the process send.

        Args:
            unrecorded: a notification that could not be written to the event log.
        """
        if self.process is None or self.process.stdin is None or self.process.stdin.closed:
            return
        # The sender may have ended already.
        with contextlib.suppress(OSError):
            if unrecorded is not None:
                self.process.stdin.write(_packed(unrecorded))
            self.process.stdin.close()

    def wait(self, seconds: float = PATIENCE) -> None:
        """Wait until the process has sent, for ``seconds`` at most: Slurm ends it with the batch script."""
        self.release()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)


NO_SENDER = Sender(None)


def start(run: RunDirectory, watch: Watch | None) -> Sender:
    """Start a sender for ``run``. An error prints one line and does not change the decision.

    Args:
        watch: the run's section of the config; None: the sender reads it.
    """
    if watch is not None and not watch.notify:
        return NO_SENDER
    environ = {name: value for name, value in os.environ.items() if name not in _MARKS}
    try:
        return Sender(
            subprocess.Popen(
                [sys.executable, "-m", "hpcrun.job.notify.sender", str(run.path)],
                stdin=subprocess.PIPE,
                env=environ,
                start_new_session=True,
            )
        )
    except OSError as error:
        say(f"hpcrun: no notification: the sender cannot be started: {error}")
        return NO_SENDER


def send_left(run: RunDirectory) -> None:
    """Start a sender if an earlier sender of the run ended before its delivery; raises OSError."""
    if due(read_events(run)):
        start(run, None).release()


def _packed(one: Due) -> bytes:
    event = one.event
    return json.dumps(
        {
            "name": one.name,
            "job": one.attempt.job,
            "restart": one.attempt.restart,
            "time": event.time,
            "cause": event.cause,
            "step": event.step,
            "fields": event.fields,
        }
    ).encode()
