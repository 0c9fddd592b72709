"""The end of a rank's script in the run's records: an orderly stop, or a failure with its last message."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.diagnose.script_log import LOG_ENDS
from hpcrun.job import exitcodes
from hpcrun.ranks.signals import StopReason
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import record_failure
from hpcrun.run.events import Attempt, note

# A shell exits with 128 + n if its child died of signal n.
_SHELL = 128
_STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_DIED_OF_STOP = frozenset(code for number in _STOPS for code in (-number, _SHELL + number))


class ScriptFailed(Exception):
    """The program ended with a failure; the text has its exit code and its last message."""


@dataclass(frozen=True)
class ScriptEnd:
    """A failed end.

    ``code``: -n for signal n. ``exception``: the last line of a traceback, or empty. ``last_line``: the last
    line of the log, or empty.
    """

    command: Sequence[str]
    code: int
    exception: str = ""
    last_line: str = ""

    @property
    def line(self) -> str:
        """One line that describes the end."""
        words = f": {self.exception}" if self.exception else ""
        if self.last_line and not words:
            words = f"{LOG_ENDS}{self.last_line}"
        return f"{' '.join(self.command)[:80]} {_how(self.code)}{words}"


def died_of_stop(code: int) -> bool:
    """Return True if this exit code means that a stop signal killed the program."""
    return code in _DIED_OF_STOP


def note_stop(
    run: RunDirectory,
    attempt: Attempt,
    reason: StopReason,
    code: int | None,
    saved: int | None,
    *,
    done: bool = False,
) -> None:
    """Write the event ``stopped`` of a script that received a stop signal.

    ``committed`` is true only if the script reported a save: by exit code 75, or by
    ``hpcrun.report`` after the signal.

    Args:
        code: the script's exit code, -n for signal n; None: the signal came before the script started.
        saved: the step that the script reported as saved after the signal.
        done: the script has finished its work.
    """
    step = {} if saved is None else {"step": saved}
    known = {"done": True} if done else {}
    facts = {**stop_facts(code, committed=saved is not None), **step, **known}
    note(run, "stopped", attempt, cause=reason.name.lower(), **facts)


def stop_facts(code: int | None, *, committed: bool = False) -> dict[str, Any]:
    """Return the fields of the event ``stopped`` of a script that ended with ``code``.

    Args:
        code: None: the signal came before the script started.
    """
    killed = {"killed": True} if code is None or died_of_stop(code) else {}
    return {"committed": committed or code == exitcodes.UNFINISHED, "exit_code": code, **killed}


def record_end(folder: Path, rank: int, end: ScriptEnd, step: int | None) -> None:
    """Write a failure record, from which hpcrun later finds the rank that failed first."""
    try:
        record_failure(folder, rank, ScriptFailed(end.line), step)
    except OSError as error:
        print(f"hpcrun: the failure is not recorded: {error}", file=sys.stderr, flush=True)


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by {_name(-code)}"
    if _name(code - _SHELL).startswith("SIG"):
        # With this message, a SIGKILL below a wrapper counts against the node like any other.
        return f"ended with exit code {code}: its program was killed by {_name(code - _SHELL)}"
    return f"ended with exit code {code}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
