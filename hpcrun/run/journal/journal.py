"""The file of a run's events. Restart decisions read only this file."""

from collections.abc import Callable, Mapping
from pathlib import Path

from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import append_line, read_lines
from hpcrun.run.journal.events import Event, to_events, to_line
from hpcrun.run.journal.state import State


class Journal:
    """The events of one run, in the order of writing."""

    def __init__(self, run: RunDirectory) -> None:
        self._path = run.events

    def append(self, event: Event, *, durable: bool = True) -> None:
        """Append ``event``. Never call this in a signal handler.

        Args:
            event: the event.
            durable: fsync before returning.

        Raises:
            OSError: the disk refused.
        """
        append_line(self._path, to_line(event), durable=durable)

    def note(self, event: Event) -> None:
        """Append as :meth:`append`; on a full disk, report the loss of the event and continue."""
        try:
            self.append(event)
        except OSError as error:
            say_aside(f"hpcrun: event {event.tag} is not written: {error}")

    def read(self) -> State:
        """Return the state that follows from all valid events; damaged lines are skipped.

        Raises:
            OSError: the file cannot be read.
        """
        return State(to_events(read_lines(self._path)))


Reader = Callable[[RunDirectory], State]
"""Returns the state of a run, as ``read_state`` does."""


def read_state(run: RunDirectory) -> State:
    """Return the state of ``run`` by its journal; raises OSError as :meth:`Journal.read`."""
    return Journal(run).read()


class StateCache:
    """The states of many runs, each read once.

    Args:
        before: the result of an earlier read; a journal of unchanged length is not read again.
    """

    def __init__(self, before: "StateCache | None" = None) -> None:
        self._old: Mapping[Path, tuple[tuple[int, int, int] | None, State]]
        self._old = {} if before is None else before._read
        self._read: dict[Path, tuple[tuple[int, int, int] | None, State]] = {}

    def __call__(self, run: RunDirectory) -> State:
        """Return the state of ``run``; raises OSError if its journal cannot be read."""
        if run.path not in self._read:
            mark = signature(run.events)
            old = self._old.get(run.path)
            if old is None or mark is None or old[0] != mark:
                old = mark, read_state(run)
            self._read[run.path] = old
        return self._read[run.path][1]


def signature(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with each line appended to the file; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def job_of_process(run: RunDirectory, pid: int) -> str:
    """Return a name for the job of an attempt without a scheduler, such as ``pid1234``.

    A second attempt in the same process is ``pid1234-2``, because an old name would bring back the failures
    of the earlier attempt. Process ids also repeat, in every container.
    """
    opened = {one.attempt.job for one in read_state(run).openings if one.attempt}
    name, number = f"pid{pid}", 1
    while name in opened or run.job_logs(name).exists():
        number += 1
        name = f"pid{pid}-{number}"
    return name
