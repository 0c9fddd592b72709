"""A command in a pseudo-terminal: its output, and the keys that a person presses."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.jobs import PATIENCE


class Terminal:
    """`hpcrun ARGUMENTS`, or another program, in a pseudo-terminal (pty(7)), ``columns`` wide."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        columns: int = 80,
        term: str = "xterm-256color",
        program: Sequence[str] = (sys.executable, "-m", "hpcrun"),
    ) -> None:
        self.text = ""
        self._pid, self._master = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            environ = os.environ | {"TERM": term, "PYTHONPATH": str(Path(__file__).parents[2])}
            os.execvpe(program[0], [*program, *arguments], environ)
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def read_until(self, pattern: str, timeout: float = PATIENCE) -> "re.Match[str]":
        """Wait until ``pattern`` appears after the previous match; fail after ``timeout`` s."""
        deadline = time.monotonic() + timeout
        while True:
            found = re.search(pattern, self.text)
            if found:
                self.text = self.text[found.end() :]
                return found
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            if not self._read(0.1):
                found = re.search(pattern, self.text)
                assert found, f"it ended without {pattern!r}: {self.text!r}"

    def type(self, keys: str) -> None:
        """Type ``keys``."""
        os.write(self._master, keys.encode())

    def press_ctrl_c(self) -> None:
        """Press Ctrl-C: the terminal sends SIGINT to its foreground processes."""
        os.write(self._master, b"\x03")

    def hang_up(self) -> None:
        """Close the terminal: the kernel sends SIGHUP to its processes."""
        os.close(self._master)
        os.waitpid(self._pid, 0)

    def end(self, timeout: float = PATIENCE) -> int:
        """Wait for the end, with all output in ``text``; return the exit code."""
        deadline = time.monotonic() + timeout
        while self._read(0.1):
            assert time.monotonic() < deadline, f"still there after {timeout} s: {self.text!r}"
        os.close(self._master)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def kill(self) -> None:
        """Kill the program after a failed test."""
        try:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._master)
        except (ProcessLookupError, ChildProcessError, OSError):
            return

    def _read(self, timeout: float) -> bool:
        """Read the available output; return False after the program has closed the terminal."""
        if select.select([self._master], [], [], timeout)[0]:
            try:
                new = os.read(self._master, 65536)
            except OSError:
                return False
            self.text += new.decode(errors="replace")
            return bool(new)
        return True
