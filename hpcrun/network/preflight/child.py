"""The child process of an agent, which imports torch and prints a line of JSON for each result."""

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

_TICK, _LAST = 0.1, 5.0
_LONGEST = 300
_FOLDERS = ("/dev/shm", "/tmp")


class Child:
    """A program with a first line of output that reports the end of its imports.

    Its output goes to files in memory: a full disk is a finding of other checks.
    """

    def __init__(self, command: Sequence[str], *, folders: Sequence[str] = _FOLDERS) -> None:
        """Start ``command``; ``folders``: where the output goes if Python cannot make a file in memory.

        Raises:
            OSError: no folder takes a file, or the program cannot be started.
        """
        self._output, self._errors = (_memory_file(name, folders) for name in ("output", "errors"))
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._errors
        )

    def wait(self, imports: float, seconds: float) -> dict[str, Any] | None:
        """Wait for the end of the program; return the problem, or None.

        Args:
            imports: seconds until its first line.
            seconds: seconds from the first line to its end.
        """
        until, imported = time.monotonic() + imports, False
        while (code := self._process.poll()) is None:
            if not imported and b"\n" in _read(self._output):
                until, imported = time.monotonic() + seconds, True
            if time.monotonic() >= until:
                self.kill()
                what = f"no result within {seconds:g} s"
                return {"problem": what if imported else f"torch not imported in {imports:g} s"}
            time.sleep(_TICK)
        if code == 0:
            return None
        words = _read(self._errors).decode(errors="replace").strip().splitlines()
        return {"problem": (words or [f"exit code {code}"])[-1][:_LONGEST], "code": code}

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the results that the program has printed."""
        for line in _read(self._output).splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def kill(self) -> None:
        """End the program, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            # A program that waits for an unavailable file server cannot be killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_LAST)


def _memory_file(name: str, folders: Sequence[str]) -> int:
    """Return a descriptor of a new file in memory, or else in one of ``folders``; raises OSError."""
    # An interpreter that was built with a glibc before 2.27, such as conda-forge's, lacks the function.
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    refused = OSError("no folder is tried")
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                return os.dup(file.fileno())
        except OSError as error:
            refused = error
    raise refused


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
