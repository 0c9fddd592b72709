"""Run the external programs; other modules build their command lines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from .errors import CommandFailed, Refusal

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def clean_environment() -> dict[str, str]:
    """Return the environment for daemons and helpers, without the variables of the caller's shell."""
    return {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", "HOME": "/"}


def run(
    argv: list[str],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> str:
    """Run ``argv`` and return its standard output; raise `CommandFailed` with its error message."""
    done = attempt(argv, stdin=stdin, env=env, timeout=timeout)
    if done.returncode != 0:
        raise CommandFailed(argv, done.returncode, done.stderr or done.stdout)
    return done.stdout


def attempt(
    argv: list[str],
    *,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``argv`` where a failure is a valid answer (readiness polls, clean-up)."""
    # An empty pipe means no input: a helper must never read the caller's terminal.
    text = "" if stdin is None else stdin
    full_env = {**clean_environment(), **(env or {})}
    try:
        return subprocess.run(
            argv,
            input=text,
            env=full_env,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            # Hands on the lock of `registry.exclusive`: when we are killed, the next `up` or
            # `down` waits for the helper that we left behind.
            close_fds=False,
            # And that helper then finishes: with SIGPIPE ignored, as it is in Python, a message
            # into our closed pipe does not end it with the password file locked.
            restore_signals=False,
        )
    except FileNotFoundError as error:
        raise Refusal(
            f"the program {argv[0]} is not installed", "run `tools/devcluster install`"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(argv, 124, f"no answer within {timeout:.0f} s") from error


def running_as_root() -> bool:
    """Return True for root; only root can use namespaces, device nodes and other users' processes."""
    return os.geteuid() == 0
