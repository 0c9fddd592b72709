"""Notifications of a run: the message, and the process of the user's command that gets the message.

A restart does not wait for the command. A sweep has one message, from the run that ends last.
"""

import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcrun.config import Watch
from hpcrun.errors import UserError
from hpcrun.printing import escaped, say
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name
from hpcrun.run.files import read_json
from hpcrun.run.journal.events import Cause
from hpcrun.run.sweep_file import is_element, read_sweep
from hpcrun.slurm.launch import jobs


@dataclass(frozen=True)
class Notification:
    """A notification that may be sent: its name (such as ``failed``), and what the message says."""

    name: str
    attempt: Attempt
    cause: str
    reason: str
    decision: str = ""
    step: int | None = None
    host: str | None = None


def notification_of(cause: Cause, *, restart: bool, attempts: int) -> str:
    """Return the name of the notification for the end of an attempt.

    Args:
        cause: the cause of the end.
        restart: another attempt follows.
        attempts: attempts since the last submission by a person, this one included.
    """
    if restart:
        return _REQUEUED
    if cause in (Cause.FINISHED, Cause.CANCELLED):
        return str(cause.value)
    first = attempts < 2 and cause is not Cause.EXHAUSTED
    return "failed" if first or cause in (Cause.BAD_INPUT, Cause.SAVE_FAILED) else "budget-used-up"


_REQUEUED = "requeued"
_STATES = ("failed", "stopped", "cancelled", "finished")


_LINES, _LINE_CHARACTERS = 20, 300
_REASON_CHARACTERS = 1000
_VARIABLES = ("run", "name", "event", "cause", "reason", "step", "job", "host", "time", "text")


def message(run: RunDirectory, one: Notification) -> dict[str, Any]:
    """Return the message as data for JSON."""
    reason, decision = (escaped(text)[:_REASON_CHARACTERS] for text in (one.reason, one.decision))
    step = "" if one.step is None else f" at step {one.step}"
    return {
        "id": f"{run.name}/{one.attempt.owner}/{one.name}",
        "event": one.name,
        "name": run.name,
        "run": str(run.path),
        "cause": one.cause,
        "reason": reason,
        "decision": decision,
        "step": one.step,
        "job": one.attempt.job,
        "restart": one.attempt.restart,
        "in_place": one.attempt.in_place,
        "host": one.host or node_name(),
        "time": round(time.time(), 3),
        "text": f"{run.name}: {one.name}{step}{': ' if reason else ''}{reason}",
    }


def sweep_message(run: RunDirectory, one: Notification) -> dict[str, Any] | None:
    """Return the message about the sweep of ``run``; None if another run of it has a job, or has sent it.

    Raises:
        RunError: sweep.json is damaged.
        OSError: the sweep folder cannot be read or written.
    """
    folder = run.path.parent
    sweep = read_sweep(folder)
    runs = [each for each in (sweep.directories.values() if sweep else ()) if each.exists()]
    others = (each for each in reversed(runs) if each.path != run.path)
    # A listing is new also on NFS, which keeps the answer that a file is missing.
    missing = (each for each in others if each.result.name not in os.listdir(each.path))  # noqa: PTH208
    states = {run: one.name if one.name in _STATES else "failed"}
    # If the last run of a sweep waits, the other runs are not read.
    for some in ([*itertools.islice(missing, 1)], [*missing]):
        found = jobs.states(some)
        if any(state.live for state in found):
            return None
        states |= {each: state.word for each, state in zip(some, found, strict=True)}
    results = {each: read_json(each.result) or {} for each in runs}
    words = {
        each: str(kept.get("state", states.get(each, "lost"))) for each, kept in results.items()
    }
    counts = Counter(words.values())
    event = next((word for word in _STATES if counts[word]), "failed")
    # Two runs may end at the same time.
    digest = hashlib.sha256(repr([*results.values()]).encode()).hexdigest()[:12]
    try:
        (folder / f".notified-{digest}").touch(0o600, exist_ok=False)
    except FileExistsError:
        return None
    tally = ", ".join(f"{number} {word}" for word, number in counts.most_common())
    lines = [
        escaped(f"{each.name}: {word}: {results[each].get('reason') or ''}")[:_LINE_CHARACTERS]
        for each, word in words.items()
        if word != "finished"
    ]
    return {
        **message(run, one),
        **dict.fromkeys(("cause", "reason", "decision"), ""),
        "step": None,
        "id": f"{folder.name}/{digest}/{event}",
        "event": event,
        "name": folder.name,
        "run": str(folder),
        "lines": lines[:_LINES],
        "text": f"{folder.name}: {event}: {len(words)} runs: {tally}",
    }


COMMAND_TIMEOUT = 30.0
"""Seconds after which the command is killed."""
# Seconds that a batch script without a next attempt waits for the command; Slurm ends the command after that.
PATIENCE = 60.0
# Slurm signals all processes of a batch script. The output of the command may contain secrets.
_DELIVERY = (
    'trap "" TERM INT HUP USR1 USR2; timeout -s KILL "$2" bash -c "$1" > /dev/null 2>&1 || '
    'echo "hpcrun: no notification: the command ended with exit code $?"'
)
# The local cluster's controller ends the processes with this variable at its end.
_MARK = "HPCRUN_LOCAL_JOB"


def start(run: RunDirectory, watch: Watch, one: Notification) -> "subprocess.Popen[bytes] | None":
    """Start the command of ``watch.notify``, if it is to get this notification; an error prints one line."""
    whole = is_element(run) and one.name != _REQUEUED
    if watch.notify is None or not (whole or one.name in watch.notify_on):
        return None
    try:
        content = sweep_message(run, one) if whole else message(run, one)
        if content is None:
            return None
        same = {"failed", "budget-used-up"} if whole and content["event"] == "failed" else set()
        if {content["event"], *same}.isdisjoint(watch.notify_on):
            return None
        return deliver(watch.notify, content)
    except (OSError, UserError) as error:
        say(f"hpcrun: no notification: {error}")
        return None


def deliver(command: str, content: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
    """Give ``content`` to the shell command; raises OSError if no process can be started."""
    # execve(2) takes no NUL.
    values = {
        f"HPCRUN_{key.upper()}": "" if content[key] is None else str(content[key]).replace("\0", "")
        for key in _VARIABLES
    }
    environ = {name: value for name, value in os.environ.items() if name != _MARK}
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps(content).encode() + b"\n")
        given.seek(0)
        return subprocess.Popen(
            ["bash", "-c", _DELIVERY, "hpcrun", command, f"{COMMAND_TIMEOUT:g}"],
            stdin=given,
            env={**environ, **values},
            start_new_session=True,
        )


def wait(sender: "subprocess.Popen[bytes] | None", seconds: float = PATIENCE) -> None:
    """Wait until the command has ended, for ``seconds`` at most."""
    if sender is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            sender.wait(seconds)
