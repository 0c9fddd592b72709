"""Notifications of a run: the message, and the process that hands it to the user's command.

The event of an end names its notification. The process (``python -m hpcrun.job.notifying RUN``) is separate,
because a slow command must not delay a restart. A sweep has one message, from the run that ends last.
"""

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.config import Watch, load_resolved, masked
from hpcrun.errors import UserError
from hpcrun.printing import escaped, say
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name
from hpcrun.run.events import Attempt, Cause, Event, read_events
from hpcrun.run.files import read_json
from hpcrun.run.sweep_file import is_element, read_sweep
from hpcrun.slurm.launch import jobs

KEY = "notification"
"""The field of an event that names the notification."""


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
        return _REQUEUED
    if cause in (Cause.FINISHED, Cause.CANCELLED):
        return str(cause.value)
    first = attempts < 2 and cause is not Cause.EXHAUSTED
    return "failed" if first or cause in (Cause.BAD_INPUT, Cause.SAVE_FAILED) else "budget-used-up"


_REQUEUED = "requeued"
_STATES = ("failed", "stopped", "cancelled", "finished")


def wanted(run: RunDirectory, watch: Watch) -> Collection[str]:
    """Return the notifications that an end of ``run`` may ask for; each last end of a sweep's run does."""
    if not watch.notify:
        return ()
    return {*watch.notify_on, *_STATES, "budget-used-up"} if is_element(run) else watch.notify_on


def due(events: Sequence[Event]) -> Due | None:
    """Return the notification that the newest end asks for, or None."""
    ends = (one for one in reversed(events) if one.what in ("ended", "given-up"))
    end = next(ends, None)
    if end is None or end.attempt is None or KEY not in end.fields:
        return None
    return Due(str(end.fields[KEY]), end.attempt, end)


_LINES, _LINE_CHARACTERS = 20, 300
_REASON_CHARACTERS = 1000
_VARIABLES = ("run", "name", "event", "cause", "reason", "step", "job", "host", "time", "text")


def message(run: RunDirectory, due: Due) -> dict[str, Any]:
    """Return the message as data for JSON."""
    event = due.event
    reason, decision = (
        escaped(str(event.fields.get(key) or ""))[:_REASON_CHARACTERS]
        for key in ("reason", "decision")
    )
    step = "" if event.step is None else f" at step {event.step}"
    return {
        "id": f"{run.name}/{due.attempt.owner}/{due.name}",
        "event": due.name,
        "name": run.name,
        "run": str(run.path),
        "cause": event.cause or "",
        "reason": reason,
        "decision": decision,
        "step": event.step,
        "job": due.attempt.job,
        "restart": due.attempt.restart,
        "in_place": due.attempt.in_place,
        "host": str(event.fields.get("host") or node_name()),
        "time": round(event.time, 3),
        "text": f"{run.name}: {due.name}{step}{': ' if reason else ''}{reason}",
    }


def sweep_message(run: RunDirectory, due: Due) -> dict[str, Any] | None:
    """Return the message about the sweep of ``run``; None if another run of it has a job, or has sent it.

    Raises:
        RunError: sweep.json is damaged.
        OSError: the sweep folder cannot be read or written.
    """
    folder = run.path.parent
    sweep = read_sweep(folder)
    runs = [one for one in (sweep.directories.values() if sweep else ()) if one.exists()]
    others = (one for one in reversed(runs) if one.path != run.path)
    # A listing is new also on NFS, which keeps the answer that a file is missing.
    missing = (one for one in others if one.result.name not in os.listdir(one.path))  # noqa: PTH208
    states = {run: due.name if due.name in _STATES else "failed"}
    # If the last run of a sweep waits, the other runs are not read.
    for some in ([*itertools.islice(missing, 1)], [*missing]):
        found = jobs.states(some)
        if any(state.live for state in found):
            return None
        states |= {one: state.word for one, state in zip(some, found, strict=True)}
    results = {one: read_json(one.result) or {} for one in runs}
    words = {one: str(kept.get("state", states.get(one, "lost"))) for one, kept in results.items()}
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
        escaped(f"{one.name}: {word}: {results[one].get('reason') or ''}")[:_LINE_CHARACTERS]
        for one, word in words.items()
        if word != "finished"
    ]
    return {
        **message(run, due),
        **dict.fromkeys(("cause", "reason", "decision"), ""),
        "step": None,
        "id": f"{folder.name}/{digest}/{event}",
        "event": event,
        "name": folder.name,
        "run": str(folder),
        "lines": lines[:_LINES],
        "text": f"{folder.name}: {event}: {len(words)} runs: {tally}",
    }


# Seconds.
COMMAND_TIMEOUT = 30.0
_PROBLEM_CHARACTERS = 300


class DeliveryError(Exception):
    """A message that was not delivered; the text says why and contains no URL."""


def deliver(command: str, content: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Give ``content`` to the shell command of ``watch.notify``.

    Raises:
        DeliveryError: with the reason.
    """
    try:
        _run(command, content, environ)
    except (DeliveryError, OSError) as problem:
        words = escaped(" ".join(masked(str(problem)).split()))
        raise DeliveryError(words[:_PROBLEM_CHARACTERS]) from None


def _run(command: str, content: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Run ``command`` in a shell.

    Its output goes to files, not pipes: a background process may keep a pipe open for hours.
    """
    # execve(2) takes no NUL.
    values = {
        f"HPCRUN_{key.upper()}": "" if content[key] is None else str(content[key]).replace("\0", "")
        for key in _VARIABLES
    }
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(json.dumps(content).encode() + b"\n")
        given.seek(0)
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdin=given,
            stdout=printed,
            stderr=printed,
            env={**environ, **values},
            start_new_session=True,
        )
        try:
            code = process.wait(COMMAND_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise DeliveryError(f"the command took longer than {COMMAND_TIMEOUT:g} s") from None
        if code:
            printed.seek(0)
            lines = printed.read(1 << 16).decode(errors="replace").strip().splitlines()
            words = f": {lines[-1]}" if lines else ""
            raise DeliveryError(f"the command ended with exit code {code}{words}")


# Seconds that a batch script without a next attempt waits for its sender; Slurm ends the sender after that.
PATIENCE = 60.0
# The local cluster's controller ends the processes with this variable at its end.
_MARK = "HPCRUN_LOCAL_JOB"


def start(run: RunDirectory, watch: Watch) -> "subprocess.Popen[bytes] | None":
    """Start the process that sends what is due; None if nothing is. An error prints one line."""
    try:
        if not watch.notify or due(read_events(run)) is None:
            return None
        return subprocess.Popen(
            [sys.executable, "-m", "hpcrun.job.notifying", str(run.path)],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != _MARK},
            start_new_session=True,
        )
    except OSError as error:
        say(f"hpcrun: no notification: {error}")
        return None


def wait(sender: "subprocess.Popen[bytes] | None", seconds: float = PATIENCE) -> None:
    """Wait until ``sender`` has sent, for ``seconds`` at most."""
    if sender is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            sender.wait(seconds)


def send(run: RunDirectory, one: Due) -> None:
    """Send ``one``, if the config of the run asks for it; an error prints one line."""
    try:
        watch = load_resolved(run.config).watch
        if watch.notify is None:
            return
        whole = is_element(run) and one.name != _REQUEUED
        content = sweep_message(run, one) if whole else message(run, one)
        if content is None:
            return
        same = {"failed", "budget-used-up"} if whole and content["event"] == "failed" else set()
        if not {content["event"], *same}.isdisjoint(watch.notify_on):
            deliver(watch.notify, content, os.environ)
    except (OSError, UserError, DeliveryError) as error:
        say(f"hpcrun: no notification: {masked(str(error))}")


def main(arguments: list[str]) -> None:
    """Send what is due for the run in ``arguments``; ignore signals, which Slurm sends to a whole script."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    run = RunDirectory(Path(arguments[0]))
    one = due(read_events(run))
    if one is not None:
        send(run, one)


if __name__ == "__main__":
    main(sys.argv[1:])
