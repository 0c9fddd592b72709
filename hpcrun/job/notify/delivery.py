"""The delivery of a message: as JSON to a webhook, or to a command. Every delivery has a time limit."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPMessage
from typing import IO, Any

from hpcrun.config import masked
from hpcrun.job.notify.message import variables
from hpcrun.printing import escaped

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
