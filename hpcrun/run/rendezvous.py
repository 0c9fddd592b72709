"""The rendezvous of an attempt's ranks: rank 0 publishes its addresses and the port that it has bound.

A port computed from the job id collides with other jobs and with ephemeral ports (enroot #243); a bound port
has no race. On each node, one rank reads the published file from the shared file system and copies it to a
file in memory for the node's other ranks: thousands of ranks that poll for a missing file would overload the
metadata server of a parallel file system.
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
from hpcrun.run.files import make_log_folder, read_json, write_json

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_FIRST_PATIENCE, _LONGEST_PATIENCE = 3.0, 30.0


End = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class Rendezvous:
    """The published data of rank 0.

    Attributes:
        addresses: rank 0's names and addresses, in the order to try.
        port: the port that rank 0 listens on.
        script_port: the port for the script that rank 0 starts; 0 without a script.
        end: the end of this script, after which rank 0 does not listen any more.
        step: rank 0's job step, since all steps of an salloc are the same attempt.
        key: a secret that only rank 0 knows until it publishes it.
    """

    addresses: tuple[str, ...]
    port: int
    script_port: int = 0
    end: End | None = None
    step: str = ""
    key: str = field(default_factory=lambda: secrets.token_hex(16))


class ScriptEnded(Exception):
    """The script of rank 0 ended before this rank connected; ``rendezvous`` has the end."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(f"rank 0's script has ended: {rendezvous.end}")
        self.rendezvous = rendezvous


class RendezvousStopped(Exception):
    """A stop signal arrived before this rank connected to rank 0."""


class RendezvousFile:
    """The file through which rank 0 publishes its address, and from which other ranks read it.

    Args:
        first: True for the first rank of a node, which reads the shared file for all its ranks.
        memory: a folder in memory that all ranks of the node can read.
        step: the job step of this rank.
        second_look: seconds between two looks into the shared file, for a rank that waits for its node's
            first rank: containers may hide the node's memory folder, and the first rank may have died.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        *,
        first: bool,
        memory: Path | None = None,
        step: str = "",
        second_look: float = 10.0,
    ) -> None:
        self._shared = run.attempt_logs(attempt) / "master.json"
        name = hashlib.blake2b(f"{run.path} {attempt.owner}".encode(), digest_size=12).hexdigest()
        self._handed = (memory or memory_folder()) / f"hpcrun-{os.geteuid()}-{name}.json"
        self._first, self._step, self._second_look = first, step, second_look
        self._published: Rendezvous | None = None

    def publish(self, rendezvous: Rendezvous) -> None:
        """Publish the address of rank 0; raises OSError if the shared file cannot be written."""
        rendezvous = replace(rendezvous, step=self._step)
        make_log_folder(self._shared.parent)
        write_json(self._shared, asdict(rendezvous))
        self._published = rendezvous
        self._hand_over(rendezvous)

    def publish_end(self, end: End) -> None:
        """Publish the end of rank 0's script; raises OSError as :meth:`publish` does.

        Otherwise, a rank that starts late would look for rank 0 until its timeout.
        """
        if self._published is not None:
            write_json(self._shared, asdict(replace(self._published, end=end)))

    def wait(
        self,
        timeout: float,
        tried: Rendezvous | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Rendezvous:
        """Return the published address; wait up to ``timeout`` seconds for it.

        NFS may show a new file late (attribute cache, nfs(5): up to 60 s), so a missing file proves nothing.

        Args:
            tried: an address that failed; it is returned again only if rank 0 still publishes it.
            stop: returns True if this rank must stop.

        Raises:
            RunError: rank 0 published nothing in time.
            RendezvousStopped: ``stop`` has become true.
        """
        deadline = time.monotonic() + timeout
        between = 0.0 if self._first else self._second_look
        pause, second_look = _FIRST_PAUSE, time.monotonic() + between
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
                second_look = time.monotonic() + between
            if stop():
                raise RendezvousStopped
            if time.monotonic() > deadline:
                raise RunError(
                    f"{self._shared}: rank 0 published no address within {timeout:.0f} s; check its "
                    "log, and check that all nodes see this folder"
                )
            time.sleep(min(pause, max(0.0, deadline - time.monotonic()) + _FIRST_PAUSE))
            pause = min(pause * 1.5, _LONGEST_PAUSE if self._first else 4 * _FIRST_PAUSE)

    def meet(
        self,
        connect: Callable[[str, Rendezvous, float], T | None],
        timeout: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> T:
        """Return the result of ``connect`` for the first address that reaches rank 0.

        Args:
            connect: takes an address, the published data and the seconds to try; returns None if the
                address does not reach rank 0.
            timeout: seconds for all attempts together.
            stop: returns True if this rank must stop.

        Raises:
            RunError: rank 0 published nothing, or none of its addresses is reachable.
            ScriptEnded: the script of rank 0 has ended.
            RendezvousStopped: ``stop`` has become true.
        """
        deadline = time.monotonic() + timeout
        patience, rendezvous = _FIRST_PATIENCE, self.wait(timeout, stop=stop)
        while True:
            # The end of an earlier step says nothing about this step.
            if rendezvous.end is not None and rendezvous.step == self._step:
                raise ScriptEnded(rendezvous)
            for address in rendezvous.addresses:
                if stop():
                    raise RendezvousStopped
                met = connect(address, rendezvous, patience)
                if met is not None:
                    return met
            if time.monotonic() > deadline:
                raise RunError(_unreachable(rendezvous.addresses, rendezvous.port, timeout))
            time.sleep(_LONGEST_PAUSE)
            patience = min(2 * patience, _LONGEST_PATIENCE)
            # Rank 0 may have restarted, or the file may be from an earlier start.
            rendezvous = self.wait(2 * self._second_look, tried=rendezvous, stop=stop)

    def clear(self) -> None:
        """Remove the node's copy, once every rank of the node has met rank 0."""
        if self._first:
            with contextlib.suppress(OSError):
                self._handed.unlink()

    def _hand_over(self, rendezvous: Rendezvous) -> None:
        # If the folder is full or foreign, the other ranks read the shared file instead.
        with contextlib.suppress(OSError):
            write_json(self._handed, asdict(rendezvous))


def _unreachable(addresses: Sequence[str], port: int, timeout: float) -> str:
    return (
        f"{os.uname().nodename}: rank 0 listens on port {port} of {', '.join(addresses)}, but none of "
        f"these addresses was reachable within {timeout:.0f} s; set the network between the nodes with "
        "job.interface, or set MASTER_ADDR, and check for a firewall"
    )


def _read(path: Path, *, of_us: bool = False) -> Rendezvous | None:
    """Return the data in ``path``; None if it is missing or, with ``of_us``, belongs to another user."""
    try:
        value = _read_own(path) if of_us else read_json(path)
    except OSError:
        # A stale handle (NFS) is temporary; the caller's timeout covers other errors.
        return None
    if not isinstance(value, dict):
        return None
    try:
        return Rendezvous(
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
    # O_NONBLOCK: an open of another user's named pipe would wait for its writer.
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
    """Return a folder in the node's memory, or the folder for temporary files if there is none."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
