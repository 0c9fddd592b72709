"""Notifications of a run: the message, and the process that sends it.

The event of an end names its notification. A later event ``notified`` or ``notify-failed`` records its
delivery. So a process can find in the event log what a killed process has not sent.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.config import Watch
from hpcrun.job.scheduler_view import batch_log
from hpcrun.printing import escaped, logged, say
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name, read_failures
from hpcrun.run.events import Attempt, Cause, Event, read_events
from hpcrun.run.files import end_of, finite, parse_line

KEY = "notification"
"""The field of an event that names the notification."""

_FAILED = (Cause.BAD_INPUT, Cause.SAVE_FAILED)


@dataclass(frozen=True)
class Due:
    """A notification to send: its name (such as ``failed``), the attempt, and the event that asks for it."""

    name: str
    attempt: Attempt
    event: Event


def notification_of(cause: Cause, *, restart: bool, attempts: int) -> str:
    """Return the name of the notification for the end of an attempt.

    Args:
        cause: the cause of the end.
        restart: another attempt follows.
        attempts: attempts since the last submission by a person, this one included.
    """
    if restart:
        return "requeued"
    if cause is Cause.FINISHED:
        return "finished"
    if cause is Cause.CANCELLED:
        return "cancelled"
    if cause in _FAILED or (attempts < 2 and cause is not Cause.EXHAUSTED):
        return "failed"
    return "budget-used-up"


def due(events: Sequence[Event]) -> list[Due]:
    """Return the notifications in the event log without a recorded delivery, in order."""
    asked: dict[tuple[str, Attempt], Due] = {}
    for event in events:
        name = event.fields.get(KEY)
        if not isinstance(name, str) or event.attempt is None:
            continue
        if event.what in ("notified", "notify-failed"):
            asked.pop((name, event.attempt), None)
        else:
            asked[name, event.attempt] = Due(name, event.attempt, event)
    return list(asked.values())


LINES, LINE_CHARACTERS = 20, 300
"""The most lines of the log in a message, and characters of a line."""
_REASON_CHARACTERS = 1000
_LOG_END = 1 << 16
"""Bytes that are read from the end of a file."""

_VARIABLES = (
    "run",
    "name",
    "event",
    "cause",
    "reason",
    "step",
    "loss",
    "job",
    "cluster",
    "host",
    "time",
)


def message(run: RunDirectory, due: Due, cluster: str | None) -> dict[str, Any]:
    """Return the message as data for JSON; fields from unreadable files are empty.

    Args:
        cluster: the name of the cluster; None: unknown.
    """
    event = due.event
    reason = escaped(str(event.fields.get("reason") or ""))[:_REASON_CHARACTERS]
    decision = escaped(str(event.fields.get("decision") or ""))[:_REASON_CHARACTERS]
    loss = _last_loss(run)
    host = event.fields.get("host") or node_name()
    filled = {
        "id": f"{run.name}/{due.attempt.owner}/{due.name}",
        "event": due.name,
        "name": run.name,
        "run": str(run.path),
        "cause": event.cause or "",
        "reason": reason,
        "decision": decision,
        "step": event.step,
        "loss": loss,
        "job": due.attempt.job,
        "restart": due.attempt.restart,
        "cluster": cluster,
        "host": str(host),
        "time": round(event.time, 3),
        "lines": _last_lines(run, due.attempt),
    }
    return {**filled, "text": summary(filled)}


def summary(filled: Mapping[str, Any]) -> str:
    """Return the message in one line, for a channel or the subject of a mail."""
    step = "" if filled["step"] is None else f" at step {filled['step']}"
    reason = f": {filled['reason']}" if filled["reason"] else ""
    return f"{filled['name']}: {filled['event']}{step}{reason}"


def trial_message(name: str) -> dict[str, Any]:
    """Return an example message of a run called ``name``, to test a target."""
    filled: dict[str, Any] = {
        "id": f"{name}/test",
        "event": "test",
        "name": name,
        "run": "",
        "cause": "test",
        "reason": "hpcrun notify has sent this message",
        "decision": "",
        "step": None,
        "loss": None,
        "job": "",
        "restart": 0,
        "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "host": node_name(),
        "time": round(time.time(), 3),
        "lines": [],
    }
    return {**filled, "text": summary(filled)}


def variables(filled: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of a command: ``HPCRUN_EVENT`` and the others."""
    found = {
        f"HPCRUN_{key.upper()}": "" if filled[key] is None else str(filled[key])
        for key in (*_VARIABLES, "text")
    }
    # execve(2) takes no NUL.
    return {name: value.replace("\0", "") for name, value in found.items()}


def _last_lines(run: RunDirectory, attempt: Attempt) -> list[str]:
    """Return the end of the log of the rank that failed first, else of rank 0, else of the batch script."""
    folder = run.attempt_logs(attempt.job, attempt.restart)
    try:
        failed = [failure.rank for failure in read_failures(folder)]
        logs = [folder / f"rank-{rank:05d}.log" for rank in (*failed[:1], 0)]
        logs += sorted(folder.glob("*.log"))
    except OSError:
        logs = []
    found = next((lines for path in logs if (lines := _shown(end_of(path, _LOG_END)))), None)
    return found or _shown(batch_log(run, attempt).encode()[-_LOG_END:])


def _shown(raw: bytes) -> list[str]:
    lines = [logged(line) for line in raw.split(b"\n") if line.strip()]
    return [line[:LINE_CHARACTERS] for line in lines[-LINES:]]


def _last_loss(run: RunDirectory) -> float | None:
    for line in reversed(end_of(run.metrics, _LOG_END).split(b"\n")):
        found = parse_line(line) if line else None
        if found is not None and isinstance(found.get("loss"), int | float):
            loss = finite(found["loss"])
            return None if loss is None else float(loss)
    return None


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
                [sys.executable, "-m", "hpcrun.job.notify_sender", str(run.path)],
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
