"""Where the ranks of an attempt meet: rank 0 publishes its addresses and the port that it has bound.

A port computed from nothing but the job id collides with other jobs and with ephemeral ports (enroot #243);
publishing the bound port leaves no race. On each node one rank looks for the published file on the shared
file system and hands it to the node's other ranks through a file in memory: thousands of ranks that look
for a missing file load the metadata server of a parallel file system.
"""

import contextlib
import hashlib
import json
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt
from hpcrun.run.io.files import make_log_folder, read_json, write_json

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
# A rank that waits for its node's first rank looks at the shared file as well, now and then: containers
# may hide the node's memory folder from each other, and the first rank may have died.
_SECOND_LOOK = 10.0
_FIRST_PATIENCE, _LONGEST_PATIENCE = 3.0, 30.0


End = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class Meeting:
    """Rank 0's names and addresses in the order to try them, its port, and a key that only it knows.

    ``script_port`` is where the script that rank 0 starts will listen; 0 without a script. ``end``: the end
    of that script, after which nobody listens any more. ``step``: the job step of rank 0, as the steps of an
    salloc are one attempt.
    """

    addresses: tuple[str, ...]
    port: int
    script_port: int = 0
    end: End | None = None
    step: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(16))


class ScriptEnded(Exception):
    """The script of rank 0 has ended before this rank has met it; ``meeting`` has the end."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(f"rank 0's script has ended: {meeting.end}")
        self.meeting = meeting


class MeetingStopped(Exception):
    """A signal to stop came before this rank has met rank 0."""


class MeetingBoard:
    """The place where rank 0 of an attempt publishes the meeting and a rank of a node reads it.

    Args:
        first: whether this rank is the first of its node, which reads the shared file for all of them.
        memory: a folder of the node that all its ranks see.
        step: the job step of this rank.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        *,
        first: bool,
        memory: Path | None = None,
        step: str = "",
    ) -> None:
        self._shared = run.attempt_logs(attempt.job, attempt.restart) / "master.json"
        name = hashlib.blake2b(f"{run.path} {attempt.owner}".encode(), digest_size=12).hexdigest()
        self._handed = (memory or memory_folder()) / f"hpcrun-{os.geteuid()}-{name}.json"
        self._first, self._step = first, step
        self._published: Meeting | None = None

    def publish(self, meeting: Meeting) -> None:
        """Write down where rank 0 listens; raises OSError where the shared file cannot be written."""
        meeting = replace(meeting, step=self._step)
        make_log_folder(self._shared.parent)
        write_json(self._shared, asdict(meeting))
        self._published = meeting
        self._hand_over(meeting)

    def publish_end(self, end: End) -> None:
        """Write down how the script of rank 0 has ended; raises OSError as :meth:`publish` does.

        A rank that starts late would otherwise look for rank 0 until its time is over.
        """
        if self._published is not None:
            write_json(self._shared, asdict(replace(self._published, end=end)))

    def wait(
        self,
        timeout: float,
        tried: Meeting | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Meeting:
        """Return the meeting; wait up to ``timeout`` seconds for it.

        NFS may show a new file late (attribute cache, nfs(5): up to 60 s), so absence proves nothing early.

        Args:
            tried: a meeting that led nowhere; it is returned again only if rank 0 still publishes it.
            stop: says if this rank has been told to stop.

        Raises:
            RunError: rank 0 published nothing in time.
            MeetingStopped: ``stop`` has become true.
        """
        deadline = time.monotonic() + timeout
        pause, second_look = _FIRST_PAUSE, time.monotonic() + (0 if self._first else _SECOND_LOOK)
        while True:
            found = None if self._first else _read(self._handed, of_us=True)
            if found is not None and found != tried:
                return found
            if time.monotonic() >= second_look:
                found = _read(self._shared)
                if found is not None:
                    if self._first:
                        self._hand_over(found)
                    return found
                second_look = time.monotonic() + (0 if self._first else _SECOND_LOOK)
            if stop():
                raise MeetingStopped
            if time.monotonic() > deadline:
                raise RunError(
                    f"{self._shared}: rank 0 published no address within {timeout:.0f} s; look at its "
                    "log, and at whether all nodes see this folder"
                )
            time.sleep(min(pause, max(0.0, deadline - time.monotonic()) + _FIRST_PAUSE))
            pause = min(pause * 1.5, _LONGEST_PAUSE if self._first else 4 * _FIRST_PAUSE)

    def meet(
        self,
        connect: Callable[[str, Meeting, float], T | None],
        timeout: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> T:
        """Return what ``connect`` returns for the first address that leads to rank 0.

        Args:
            connect: gets an address, the meeting and the seconds to try; returns None where the address
                does not lead there.
            timeout: seconds for all of it.
            stop: says if this rank has been told to stop.

        Raises:
            RunError: rank 0 published nothing, or none of its addresses leads to it.
            ScriptEnded: the script of rank 0 has ended.
            MeetingStopped: ``stop`` has become true.
        """
        deadline = time.monotonic() + timeout
        patience, meeting = _FIRST_PATIENCE, self.wait(timeout, stop=stop)
        while True:
            # The end of an earlier step says nothing about this one.
            if meeting.end is not None and meeting.step == self._step:
                raise ScriptEnded(meeting)
            for address in meeting.addresses:
                if stop():
                    raise MeetingStopped
                met = connect(address, meeting, patience)
                if met is not None:
                    return met
            if time.monotonic() > deadline:
                raise RunError(_unreachable(meeting.addresses, meeting.port, timeout))
            time.sleep(_LONGEST_PAUSE)
            patience = min(2 * patience, _LONGEST_PATIENCE)
            # Rank 0 may have started again since, or the file may be that of an earlier start.
            meeting = self.wait(2 * _SECOND_LOOK, tried=meeting, stop=stop)

    def clear(self) -> None:
        """Remove the node's copy, once every rank of the node has met rank 0."""
        if self._first:
            with contextlib.suppress(OSError):
                self._handed.unlink()

    def _hand_over(self, meeting: Meeting) -> None:
        # A full or foreign folder costs the other ranks a look at the shared file, and nothing else.
        with contextlib.suppress(OSError):
            write_json(self._handed, asdict(meeting))


def _unreachable(addresses: Sequence[str], port: int, timeout: float) -> str:
    return (
        f"{os.uname().nodename}: rank 0 listens on port {port} of {', '.join(addresses)}, and none of "
        f"these leads to it from here within {timeout:.0f} s; name the network between the nodes with "
        "job.interface, or set MASTER_ADDR, and look for a firewall"
    )


def _read(path: Path, *, of_us: bool = False) -> Meeting | None:
    """Return the meeting in ``path``; None where there is none or, with ``of_us``, a foreign file is."""
    try:
        value = _read_own(path) if of_us else read_json(path)
    except OSError:
        # A stale handle (NFS) passes; the caller's time limit ends what does not.
        return None
    if not isinstance(value, dict):
        return None
    try:
        return Meeting(
            tuple(map(str, value["addresses"])),
            int(value["port"]),
            int(value["script_port"]),
            value["end"],
            str(value["step"]),
            str(value["key"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _read_own(path: Path) -> Any:
    """Return the JSON in a plain file that only this user can write; None for any other file."""
    # Without O_NONBLOCK opening somebody's named pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:  # noqa: PTH123  (a descriptor, checked before it is read)
        status = os.fstat(stream.fileno())
        foreign = status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if foreign or not stat.S_ISREG(status.st_mode):
            return None
        try:
            return json.loads(stream.read())
        except ValueError:
            return None


def memory_folder() -> Path:
    """Return a folder in the node's memory, or where there is none the folder for temporary files."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
