"""The end of a rank's script in the run's records: an orderly stop, or a failure with its last message."""

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.config.commands.starters import is_python_program
from hpcrun.ranks.signals import StopReason
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import (
    LOG_ENDS,
    OWN_EXIT,
    Failure,
    HeardStop,
    node_name,
    record_heard_stop,
    script_stop,
    write_failure,
)
from hpcrun.run.failures.mistakes import is_refusal, passing_of_script, repeats_at_start
from hpcrun.run.failures.script_log import ScriptError
from hpcrun.run.journal.events import Saved, Started, Stepped
from hpcrun.run.journal.journal import Journal
from hpcrun.run.rendezvous import memory_folder
from hpcrun.run.reports import VARIABLE, ScriptProgress, newest_report, publish

# A shell exits with 128 + n if its child died of signal n.
_SHELL = 128


SCRIPT_FAILED = "ScriptFailed"
"""The kind of a failure without an exception."""


@dataclass(frozen=True)
class ScriptEnd:
    """A failed end of ``command`` with exit code ``code``, -n for signal n; ``error``: from its log."""

    command: Sequence[str]
    code: int
    error: ScriptError = field(default_factory=ScriptError)

    @property
    def kind(self) -> str:
        """The type of the exception that ended the script, or ``ScriptFailed``."""
        return self.error.kind if self._raised else SCRIPT_FAILED

    @property
    def message(self) -> str:
        """The text of the exception; without one, the command, its exit code and its last line."""
        error = self.error
        rank = f"rank {error.rank} of the launcher" if error.rank is not None else ""
        if self._raised:
            # Python's text may be empty.
            words = error.message or "no message"
            return f"{words} ({rank})" if rank else words
        how = f"{OWN_EXIT} {self.code}" if self._own_exit else _how(self.code)
        words = f"{' '.join(self.command)[:80]} {how}"
        if error.name:
            # An exception that a signal followed.
            return f"{words}: {error.exception}"
        if rank and error.code is not None:
            words += f": {rank} {_how(error.code)}"
        return f"{words}{LOG_ENDS}{error.last_line}" if error.last_line else words

    @property
    def _own_exit(self) -> bool:
        """True if a Python program chose its exit code: an exception leaves a traceback."""
        own = self.code == 1 and self.error.quiet and self.error.rank is None
        return own and is_python_program(self.command)

    @property
    def _raised(self) -> bool:
        """True if the exception is the end, and no signal killed the program."""
        code = self.error.code if self.error.code is not None else self.code
        return bool(self.error.name) and (0 < code < _SHELL or _is_abort(code))

    def failure(self, rank: int, step: int | None) -> Failure:
        """Return the record of the failure of ``rank`` at ``step``."""
        error = self.error
        passing = passing_of_script(error, self.command)
        repeats = not step and not passing and repeats_at_start(error, self.code)
        return Failure(
            rank=rank,
            host=node_name(),
            time=time.time(),
            kind=self.kind,
            message=self.message,
            where=error.where,
            step=step,
            traceback=error.traceback if error.where else "",
            copy=error.copy,
            # Steps were computed with this input: the cause may be a node.
            bad_input=is_refusal(error) or repeats,
            certain=is_refusal(error),
            passing=passing,
        )


def _is_abort(code: int) -> bool:
    """Return True for the abort of an interpreter that exits: threads of gloo or CUDA may cause one."""
    aborts = (signal.SIGABRT, signal.SIGSEGV)
    return code in (*(-number for number in aborts), *(_SHELL + number for number in aborts))


def note_stop(
    run: RunDirectory,
    attempt: Attempt,
    reason: StopReason,
    code: int | None,
    saved: int | None,
    *,
    done: bool = False,
    rank: int = 0,
) -> None:
    """Write the event ``stopped`` of a script that received a stop signal.

    Another rank than rank 0 writes a file: rank 0 may not receive the signal in time.

    ``committed`` is true only if the script reported a save: by exit code 75, or by
    ``hpcrun.report`` after the signal.

    Args:
        code: the script's exit code, -n for signal n; None: the signal came before the script started.
        saved: the step that the script reported as saved after the signal.
        done: the script has finished its work.
    """
    if rank:
        logs = run.attempt_logs(attempt)
        try:
            record_heard_stop(logs, rank, HeardStop(reason.name.lower(), code, done))
        except OSError as error:
            print(f"hpcrun: the signal to stop is not recorded: {error}", file=sys.stderr)
        return
    Journal(run).note(script_stop(attempt, reason.name.lower(), code, saved=saved, done=done))


def record_end(folder: Path, rank: int, end: ScriptEnd, step: int | None) -> None:
    """Write a failure record, from which hpcrun later finds the rank that failed first."""
    try:
        write_failure(folder, end.failure(rank, step))
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


# Seconds between two published steps.
_PUBLISH = 5.0
_FOLDER = "hpcrun-progress-"
_MOST_LOOKED_AT = 10_000


def _new_folder() -> tuple[Path, int]:
    """Return a new folder for reports in the node's memory, and the descriptor that locks it.

    A folder without a lock is that of a killed rank, and is removed here.

    Raises:
        OSError: the folder cannot be made.
    """
    memory = memory_folder()
    _remove_left(memory)
    # The folder gets the name for which other ranks look after its lock.
    made = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}", dir=memory))
    lock = _locked(made)
    try:
        return made.rename(memory / made.name.removeprefix(".")), lock
    except OSError:
        # Another user has taken the name. With the hidden name, it stays after a rank that is killed.
        return made, lock


def _remove_left(memory: Path) -> None:
    """Remove this user's folders without a lock; those of other users may be deep, full or many."""
    with contextlib.suppress(OSError), os.scandir(memory) as entries:
        for entry in itertools.islice(entries, _MOST_LOOKED_AT):
            if entry.name.startswith(_FOLDER):
                # In use, or too deep.
                with contextlib.suppress(OSError, RecursionError):
                    os.close(_locked(memory / entry.name))
                    shutil.rmtree(entry.path)


def _locked(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(folder))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class ProgressWatch:
    """The reports of one rank's script; a context manager that creates and removes their folder."""

    def __init__(
        self, run: RunDirectory, attempt: Attempt, rank: int, *, every: float = 1.0
    ) -> None:
        """Prepare the reports of ``rank``; ``every``: seconds between two reads of the folder."""
        self._run, self._attempt, self._rank, self._every = run, attempt, rank, every
        self._journal = Journal(run)
        self._folder: Path | None = None
        self._lock = -1
        self._newest = self._published = ScriptProgress()
        self._looked = self._published_at = float("-inf")
        self._stop_at: float | None = None

    def __enter__(self) -> "ProgressWatch":
        try:
            # On a disk, each report would wait until the replaced file is written.
            self._folder, self._lock = _new_folder()
        except OSError as error:
            print(f"hpcrun: no reports of progress: {error}", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables through which ``hpcrun.report`` finds the folder."""
        return {} if self._folder is None else {VARIABLE: str(self._folder)}

    @property
    def step(self) -> int | None:
        """The newest step that the script has reported."""
        return self._newest.step

    @property
    def saved_since_stop(self) -> int | None:
        """The step that was reported as saved after the stop signal."""
        saved_at = self._newest.saved_at
        if self._stop_at is None or saved_at is None or saved_at < self._stop_at:
            return None
        return self._newest.saved

    @property
    def done(self) -> bool:
        """True if the script has reported that its work is finished."""
        return self._newest.done

    def stop_received(self) -> None:
        """Remember the time of the stop signal; later calls change nothing."""
        self._stop_at = self._stop_at or time.time()

    def note_start(self) -> None:
        """Write the event ``started``, with the newest step that earlier attempts have saved, if any."""
        steps = []
        with contextlib.suppress(OSError):
            attempts = self._journal.read().attempts_of_newest_job
            steps = [record.committed for record in attempts if record.committed]
        begun: dict[str, Any] = {"step": max(steps)} if steps else {}
        self._journal.note(Started(attempt=self._attempt, **begun))

    def look(self, *, last: bool = False) -> None:
        """Read the reports; rank 0 publishes new progress that is due.

        Args:
            last: the script has ended; publish now.
        """
        now = time.monotonic()
        if self._folder is None or (now - self._looked < self._every and not last):
            return
        self._looked = now
        self._newest = newest_report(self._folder)
        saved = self._newest.saved != self._published.saved
        due = last or saved or now - self._published_at >= _PUBLISH
        if self._rank != 0 or not due or self._newest == self._published:
            return
        try:
            publish(self._run.attempt_logs(self._attempt), self._newest)
        except OSError as error:
            print(f"hpcrun: the progress is not published: {error}", file=sys.stderr, flush=True)
            return
        begun = self._published.step is None and self._newest.step is not None
        self._published, self._published_at = self._newest, now
        if begun:
            self._journal.note(Stepped(attempt=self._attempt, step=self._newest.first))
        if saved:
            self._journal.note(Saved(attempt=self._attempt, step=self._newest.saved))
