"""The rendezvous of an attempt's ranks: rank 0 publishes its addresses and the port that it has bound.

A port computed from the job id collides with other jobs and with ephemeral ports (enroot #243); a bound port
has no race. Many ranks poll less often, because a missing file loads the metadata server of a parallel file
system.
"""

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import make_log_folder, read_json, write_json

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_FIRST_PATIENCE, _LONGEST_PATIENCE = 3.0, 30.0
_AGAIN = 20.0
_POLLS_PER_SECOND = 1000.0


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
        ranks: the number of ranks, which read the file at most a thousand times a second together.
        step: the job step of this rank.
    """

    def __init__(
        self, run: RunDirectory, attempt: Attempt, *, ranks: int = 1, step: str = ""
    ) -> None:
        self._path = run.attempt_logs(attempt) / "master.json"
        self._pause, self._step = ranks / _POLLS_PER_SECOND, step
        self._published: Rendezvous | None = None

    def publish(self, rendezvous: Rendezvous) -> None:
        """Publish the address of rank 0; raises OSError if the file cannot be written."""
        self._published = replace(rendezvous, step=self._step)
        make_log_folder(self._path.parent)
        write_json(self._path, asdict(self._published))

    def publish_end(self, end: End) -> None:
        """Publish the end of rank 0's script; raises OSError as :meth:`publish` does.

        Otherwise, a rank that starts late would look for rank 0 until its timeout.
        """
        if self._published is not None:
            write_json(self._path, asdict(replace(self._published, end=end)))

    def wait(self, timeout: float, stop: Callable[[], bool] = lambda: False) -> Rendezvous:
        """Return the published address; wait up to ``timeout`` seconds for it.

        NFS may show a new file late (attribute cache, nfs(5): up to 60 s), so a missing file proves nothing.

        Args:
            stop: returns True if this rank must stop.

        Raises:
            RunError: rank 0 published nothing in time.
            RendezvousStopped: ``stop`` has become true.
        """
        deadline = time.monotonic() + timeout
        pause = max(_FIRST_PAUSE, self._pause)
        while (found := _read(self._path)) is None:
            if stop():
                raise RendezvousStopped
            if time.monotonic() > deadline:
                raise RunError(
                    f"{self._path}: rank 0 published no address within {timeout:.0f} s; check its "
                    "log, and check that all nodes see this folder"
                )
            time.sleep(min(pause, max(0.0, deadline - time.monotonic()) + _FIRST_PAUSE))
            pause = min(pause * 1.5, max(_LONGEST_PAUSE, self._pause))
        return found

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
            rendezvous = self.wait(_AGAIN, stop=stop)


def _unreachable(addresses: Sequence[str], port: int, timeout: float) -> str:
    return (
        f"{os.uname().nodename}: rank 0 listens on port {port} of {', '.join(addresses)}, but none of "
        f"these addresses was reachable within {timeout:.0f} s; set the network between the nodes with "
        "job.interface, or set MASTER_ADDR, and check for a firewall"
    )


def _read(path: Path) -> Rendezvous | None:
    try:
        value = read_json(path) or {}
    except OSError:
        # A stale handle (NFS) is temporary; the caller's timeout covers other errors.
        return None
    try:
        return Rendezvous(**{**value, "addresses": tuple(map(str, value["addresses"]))})
    except (KeyError, TypeError):
        return None


def memory_folder() -> Path:
    """Return a folder in the node's memory, or the folder for temporary files if there is none."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
