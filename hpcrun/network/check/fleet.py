"""The agents of a check: processes of srun or of this machine, controlled by lines on their pipes."""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

AGENT = (sys.executable, "-m", "hpcrun.network.check.agent")


class Fleet(Protocol):
    """Agents that receive every order and answer with lines."""

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send one order to all agents."""

    def hear(self, timeout: float) -> dict[str, Any] | None:
        """Return the next answer; None after ``timeout`` seconds, or when all agents have ended."""

    def words(self) -> str:
        """Return what the launcher printed in addition to answers."""

    def ended(self) -> bool:
        """Return True if all agents have ended, or Slurm ends them."""

    def close(self) -> None:
        """End all agents."""


class Processes:
    """A fleet of child processes: one srun, or several agents of this machine."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._words: list[str] = []
        self._started = [
            subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=dict(environ),
                start_new_session=True,
            )
            for command, environ in commands
        ]
        self._left = len(self._started)
        self._readers = [
            threading.Thread(target=read, args=(process,), daemon=True)
            for process in self._started
            for read in (self._read_answers, self._read_words)
        ]
        for reader in self._readers:
            reader.start()

    def tell(self, order: Mapping[str, Any]) -> None:
        """Write one line to every process; processes that have ended are skipped."""
        line = json.dumps(order) + "\n"
        for process in self._started:
            assert process.stdin is not None
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write(line)
                process.stdin.flush()

    def hear(self, timeout: float) -> dict[str, Any] | None:
        """Return the next answer of any agent."""
        try:
            return self._answers.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None

    def words(self) -> str:
        """Return the last lines of standard error."""
        return "\n".join(self._words[-50:])

    def ended(self) -> bool:
        """Return True if every process has ended, or srun reports that Slurm cancels the step."""
        return self._left == 0 or "CANCELLED AT" in self.words()

    def close(self) -> None:
        """Ask the agents to end, and end those that do not."""
        self.tell({"type": "end"})
        for process in self._started:
            with contextlib.suppress(OSError, ValueError):
                assert process.stdin is not None
                process.stdin.close()
        for process in self._started:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                # srun ends its step at SIGTERM, and only warns at SIGINT.
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=10)
                process.kill()
        for reader in self._readers:
            reader.join(timeout=2)

    def _read_answers(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    self._answers.put(found)
        self._left -= 1
        if self._left == 0:
            self._answers.put(None)

    def _read_words(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._words.append(line.rstrip())


def srun_command(nodes: Sequence[str], agent: Sequence[str] = AGENT) -> list[str]:
    """Build the step of one task per node; standard input goes to every task, which is srun's default."""
    count = str(len(nodes))
    options = ["--nodes", count, "--ntasks", count, "--ntasks-per-node", "1", "--overlap"]
    options += ["--nodelist", ",".join(nodes), "--kill-on-bad-exit=0", "--wait=0", "--no-kill"]
    return ["srun", *options, *agent]


def not_launched(words: str, nodes: Sequence[str]) -> list[str]:
    """Return the ``nodes`` on which, according to srun, no task could start."""
    failed = set(re.findall(r"Task launch for \S+ failed on node (\S+?):", words))
    return [node for node in nodes if node in failed]


def on_slurm(nodes: Sequence[str]) -> Processes:
    """Start an agent on each of ``nodes``, which are part of this process's allocation."""
    return Processes([(srun_command(nodes), os.environ)])


def on_this_machine(count: int) -> Processes:
    """Start ``count`` agents here, which see each other through loopback."""
    return Processes(
        [
            (
                AGENT,
                {"GLOO_SOCKET_IFNAME": "lo"}
                | os.environ
                | {"SLURM_PROCID": str(index), "HPCRUN_CHECK_NAME": _loopback(index)},
            )
            for index in range(count)
        ]
    )


def _loopback(index: int) -> str:
    """Return a name of this machine for each agent: every address of 127.0.0.0/8 works."""
    return f"127.0.0.{index + 1}"
