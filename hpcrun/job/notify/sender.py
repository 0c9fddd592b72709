"""The process that sends the notifications of a run: ``python -m hpcrun.job.notify.sender RUN``.

It starts before the decision about an attempt and waits for the end of its standard input: this end means
that the deciding process has decided or died. Then the sender sends every notification that is due in the
event log, even if the deciding process was killed right after its decision. Each notification is sent at
least once: a sender that is killed between the delivery and its line in the event log leaves the notification
to the next sender, which sends it again.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from hpcrun.config import Watch, load_resolved, masked
from hpcrun.errors import ClusterError, UserError
from hpcrun.job.notification import KEY, Due, due
from hpcrun.job.notify.delivery import DeliveryError, deliver, target_of
from hpcrun.job.notify.message import message
from hpcrun.printing import say
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt, Event, note, read_events
from hpcrun.run.io.lock_file import LockFile

# Seconds for one notification.
_LIMIT = 40
_LOCK_WAIT = 50
_MOST = 20


def main(arguments: list[str]) -> None:
    """Wait for the decision, then send."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Slurm signals all processes of a batch script that it ends or requeues.
        signal.signal(number, signal.SIG_IGN)
    run = RunDirectory(Path(arguments[0]))
    signal.signal(signal.SIGALRM, _late)
    unrecorded = _unpacked(sys.stdin.buffer.read())
    try:
        config = load_resolved(run.config)
        cluster = config.job.cluster or os.environ.get("SLURM_CLUSTER_NAME")
        if unrecorded is not None and unrecorded.name in config.watch.notify_on:
            _send(run, unrecorded, config.watch, cluster)
        with _locked(run):
            _send_due(run, config.watch, cluster)
    except (OSError, UserError, ClusterError) as error:
        say(f"hpcrun: no notification: {masked(str(error))}")


def _late(_number: int, _frame: object) -> None:
    """Raise an error at the time limit: a server that sends single bytes never exceeds a socket's timeout."""
    raise DeliveryError(f"it took longer than {_LIMIT} s")


def _send_due(run: RunDirectory, watch: Watch, cluster: str | None) -> None:
    """Send until no notification is due: another process may add one during a delivery."""
    done: set[tuple[str, Attempt]] = set()
    for _ in range(_MOST):
        left = [one for one in due(read_events(run)) if (one.name, one.attempt) not in done]
        if not left:
            return
        # If the delivery cannot be recorded, the same message must not be sent in a loop.
        done.add((left[0].name, left[0].attempt))
        _send(run, left[0], watch, cluster)


def _send(run: RunDirectory, one: Due, watch: Watch, cluster: str | None) -> None:
    if watch.notify is None:
        return
    signal.alarm(_LIMIT)
    try:
        target = target_of(watch.notify, os.environ)
        deliver(target, message(run, one, cluster), os.environ)
    except (DeliveryError, OSError) as problem:
        signal.alarm(0)
        say(f"hpcrun: notification {one.name} failed: {problem}")
        note(run, "notify-failed", one.attempt, **{KEY: one.name}, reason=str(problem))
        return
    signal.alarm(0)
    note(run, "notified", one.attempt, **{KEY: one.name}, to=masked(watch.notify))


@contextlib.contextmanager
def _locked(run: RunDirectory) -> Iterator[None]:
    """Hold the lock of the run's senders; raises RunError if another sender holds it too long."""
    lock = LockFile(run.path / ".notifying", "another process sends them")
    try:
        lock.hold(_LOCK_WAIT, _LOCK_WAIT)
    except RunError as error:
        # On a full disk the lock cannot be made: two deliveries are better than none.
        if not isinstance(error.__cause__, OSError) or not run.path.exists():
            raise
    try:
        yield
    finally:
        lock.release()


def _unpacked(raw: bytes) -> Due | None:
    if not raw:
        return None
    try:
        values = json.loads(raw)
    except ValueError:
        # The writer of this line was killed.
        return None
    attempt = Attempt(values["job"], values["restart"])
    event = Event(
        "ended", values["time"], attempt, values["cause"], values["step"], values["fields"]
    )
    return Due(values["name"], attempt, event)


if __name__ == "__main__":
    main(sys.argv[1:])
