"""The process that sends the notifications of a run: ``python -m hpcrun.job.notify_sender RUN``.

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
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO, Any

from hpcrun.config import Watch, load_resolved, masked
from hpcrun.errors import ClusterError, UserError
from hpcrun.job.notifying import KEY, Due, due, message, variables
from hpcrun.printing import escaped, say
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt, Event, note, read_events
from hpcrun.run.lock_file import LockFile

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


# Seconds.
WEBHOOK_TIMEOUT, RETRY_PAUSE = 10.0, 1.0
COMMAND_TIMEOUT = 30.0
_TRIES = 2
_PROBLEM_CHARACTERS = 300
_BUSY = 429


class DeliveryError(Exception):
    """A message that was not delivered; the text says why and contains no URL."""


def target_of(value: str, environ: Mapping[str, str]) -> str:
    """Return the URL or the command that ``watch.notify`` names.

    Raises:
        DeliveryError: the variable of ``env:VARIABLE`` is not set.
    """
    if not value.startswith("env:"):
        return value
    name = value.removeprefix("env:")
    if not environ.get(name, "").strip():
        raise DeliveryError(f"the environment variable {name} is not set here")
    return environ[name]


def deliver(target: str, content: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Send ``content`` to a webhook (a target that begins with http:// or https://) or to a command.

    Raises:
        DeliveryError: with the reason.
    """
    try:
        if target.lower().startswith(("http://", "https://")):
            _post(target, content)
        else:
            _run(target, content, environ)
    except DeliveryError as problem:
        words = escaped(" ".join(masked(str(problem)).replace(target, masked(target)).split()))
        raise DeliveryError(words[:_PROBLEM_CHARACTERS]) from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET without the message."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        """Follow no redirect, so that the caller gets its status."""


def _post(url: str, content: Mapping[str, Any]) -> None:
    data = json.dumps(content).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "hpcrun"}
    opener = urllib.request.build_opener(_NoRedirect)
    for number in range(1, _TRIES + 1):
        try:
            request = urllib.request.Request(url, data, headers, method="POST")
            with opener.open(request, timeout=WEBHOOK_TIMEOUT):
                return
        except urllib.error.HTTPError as error:
            with error:
                problem = f"{masked(url)} answered {error.code} {error.reason}"
            final = error.code < 500 and error.code != _BUSY
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            problem, final = f"{masked(url)}: {reason}", False
        if final or number == _TRIES:
            raise DeliveryError(problem)
        time.sleep(RETRY_PAUSE)


def _run(command: str, content: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Run ``command`` in a shell.

    Its output goes to files, not pipes: a background process may keep a pipe open for hours.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(json.dumps(content).encode() + b"\n")
        given.seek(0)
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdin=given,
            stdout=printed,
            stderr=printed,
            env={**environ, **variables(content)},
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


if __name__ == "__main__":
    main(sys.argv[1:])
