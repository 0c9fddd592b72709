"""End exactly the processes that a cluster started.

Another process may have the same pid later, so a record also contains the start time. Jobs
start processes without a record. They are found by their network namespace,
which the cluster made and no other process enters.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import Refusal

NamespaceId = tuple[int, int]


@dataclass(frozen=True)
class ProcessId:
    """The unique identity of a process: its pid and its start in clock ticks since boot."""

    pid: int
    started: int

    def alive(self) -> bool:
        """Return True if this process still runs; False for a zombie."""
        return read_process(self.pid) == self

    def save(self, path: Path) -> None:
        """Record the process for a later `down`."""
        path.write_text(json.dumps({"pid": self.pid, "started": self.started}))

    @staticmethod
    def load(path: Path) -> ProcessId | None:
        """Return the recorded process, or None without a complete record."""
        try:
            raw = json.loads(path.read_text())
            return ProcessId(int(raw["pid"]), int(raw["started"]))
        except (OSError, ValueError, KeyError):
            return None


def parse_stat(text: str) -> tuple[str, int]:
    """Return state letter and start time from /proc/PID/stat; its name field may contain any text."""
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def read_process(pid: int) -> ProcessId | None:
    """Return the identity of the process that has ``pid`` now; None for no process and for a zombie."""
    try:
        state, started = parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (OSError, IndexError):
        return None
    return None if state in "ZX" else ProcessId(pid, started)


def namespace_id(path: Path) -> NamespaceId | None:
    """Return the identity of the namespace at ``path`` (a pin or /proc/PID/ns/net), None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def processes_in(namespaces: set[NamespaceId]) -> list[ProcessId]:
    """Return every process in one of the network ``namespaces``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and namespace_id(entry / "ns" / "net") in namespaces:
            process = read_process(int(entry.name))
            if process is not None:
                found.append(process)
    return found


def command_name(process: ProcessId) -> str:
    """Return the name of the program that the process runs; empty if it has ended."""
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


def send(process: ProcessId, number: signal.Signals) -> int | None:
    """Signal the process through a pidfd and return the pidfd; None if the process had ended already.

    Without the pidfd, another process could get the pid between the check and the signal.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if not process.alive():
        os.close(handle)
        return None
    try:
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        os.close(handle)
        return None
    return handle


def end(processes: Iterable[ProcessId], number: signal.Signals, patience_s: float) -> bool:
    """Signal all of ``processes`` and wait for their end; return True if all ended in time."""
    waiting = select.poll()
    handles = set()
    for process in processes:
        handle = send(process, number)
        if handle is not None:
            handles.add(handle)
            waiting.register(handle, select.POLLIN)
    deadline = time.monotonic() + patience_s
    try:
        while handles and (left := deadline - time.monotonic()) > 0:
            for handle, _ in waiting.poll(left * 1000):
                waiting.unregister(handle)
                handles.discard(handle)
                os.close(handle)
        return not handles
    finally:
        for handle in handles:
            os.close(handle)


def end_gently(process: ProcessId, patience_s: float = 5.0) -> None:
    """Send TERM, so that a daemon saves its state, and KILL after ``patience_s`` seconds."""
    if not end([process], signal.SIGTERM, patience_s):
        end([process], signal.SIGKILL, patience_s)


def empty(
    namespaces: set[NamespaceId], *, spare: ProcessId | None = None, patience_s: float = 15.0
) -> None:
    """Kill until only ``spare`` is left in ``namespaces``; jobs may fork at the same time."""
    deadline = time.monotonic() + patience_s
    while left := [item for item in processes_in(namespaces) if item != spare]:
        if time.monotonic() > deadline:
            names = ", ".join(f"{command_name(item)} {item.pid}" for item in left[:5])
            raise Refusal(
                f"{len(left)} processes do not end ({names})",
                "they wait for a file system; run `devcluster down` again",
            )
        for process in left:
            # A stopped FUSE server keeps its clients in uninterruptible sleep; wake it first.
            handle = send(process, signal.SIGCONT)
            if handle is not None:
                os.close(handle)
        end(left, signal.SIGKILL, 2.0)
