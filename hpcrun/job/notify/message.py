"""The message of a notification: what ended, why, and the last lines of the log."""

import os
import time
from collections.abc import Mapping
from typing import Any

from hpcrun.job.end.batch_log import batch_log
from hpcrun.job.notification import Due
from hpcrun.printing import escaped, logged
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name, read_failures
from hpcrun.run.events import Attempt
from hpcrun.run.io.files import end_of, finite, parse_line

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
