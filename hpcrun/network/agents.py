"""The agents of a check: processes of srun or of this machine, controlled by lines on their pipes.

One process asks all agents to run a function, and collects their answers. srun forwards both, so a check can
be controlled even if the checked names and links fail.
"""

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from hpcrun.nodes.lines import decode, encode, helpers_command
from hpcrun.slurm.containers import Container
from hpcrun.slurm.environment import without_rank_requests
from hpcrun.slurm.notation import STEPS

AGENT = ("-m", "hpcrun.network.agent")
CHECK = f"{STEPS}check"
"""The name of the step of a check."""
_LOST = "srun could not start a task there"
_LOST_REMEDY = "look at its slurmd, its link and its MTU"


class Processes:
    """Child processes: one srun, or several agents of this machine."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._words: deque[str] = deque(maxlen=50)
        self._started = [
            subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
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
        line = encode(order).decode()
        for process in self._started:
            assert process.stdin is not None
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write(line)
                process.stdin.flush()

    def hear(self, timeout: float) -> dict[str, Any] | None:
        """Return the next answer; None after ``timeout`` seconds, or when all processes have ended."""
        try:
            answer = self._answers.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None
        if answer is None:
            self._answers.put(None)  # for the next call
        return answer

    def words(self) -> str:
        """Return the last lines of standard error."""
        return "\n".join(self._words)

    def ended(self) -> bool:
        """Return True if every process has ended, or srun reports that Slurm cancels the step."""
        return self._left == 0 or "CANCELLED AT" in self.words()

    def close(self) -> None:
        """Ask the processes to end, and end those that do not."""
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
        self.join()

    def kill(self) -> None:
        """End the processes immediately. One that waits for an unavailable file server cannot be killed."""
        for process in self._started:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)

    def join(self) -> None:
        """Wait for the last lines of processes that have ended."""
        for reader in self._readers:
            reader.join(timeout=2)

    def _read_answers(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if (found := decode(line)) is not None:
                self._answers.put(found)
        self._left -= 1
        if self._left == 0:
            self._answers.put(None)

    def _read_words(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._words.append(line.rstrip())


class Nodes:
    """The nodes of a check. A node that does not answer is silent, and skipped from then on.

    ``live``: the nodes that answer. ``silent``: the others, each with the reason. ``ended``: the tasks of all
    nodes ended before the check did.
    """

    def __init__(self, processes: Processes, names: Sequence[str]) -> None:
        self.live = list(names)
        self.silent: dict[str, str] = {}
        self.ended = False
        self._processes, self._number = processes, 0

    def meet(self, seconds: float) -> None:
        """Wait until every node has started."""
        met = self._answers(self.live, seconds)
        reason = f"did not start within {seconds:g} s"
        if self._processes.ended():
            self._processes.join()
            reason = "srun ended before a task started there"
        self.silent.update((name, reason) for name in self.live if name not in met)
        self.live = [name for name in self.live if name in met]

    def ask(
        self,
        what: str,
        seconds: float,
        nodes: Collection[str] | None = None,
        /,
        *,
        lose: bool = True,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Run a function on the live nodes; return the result of each node that answers.

        Args:
            what: the name of an order of the agent.
            seconds: for all answers.
            nodes: only these nodes.
            lose: nodes without an answer are silent from then on.
            arguments: of the function.
        """
        self._number += 1
        asked = [name for name in self.live if nodes is None or name in nodes]
        order = {"number": self._number, "do": what, "arguments": arguments}
        self._processes.tell(order if nodes is None else order | {"nodes": asked})
        found = self._answers(asked, seconds)
        missing = [name for name in asked if name not in found]
        if missing and lose:
            self._lose(missing, f"no answer to {what!r} within {seconds:g} s")
        return {name: found[name] for name in asked if name in found}

    def words(self) -> str:
        """Return what the launcher printed in addition to answers."""
        return self._processes.words()

    def close(self) -> None:
        """End all agents."""
        self._processes.close()

    def _lose(self, missing: Sequence[str], reason: str) -> None:
        if self._processes.ended():
            # Slurm ends the tasks of all nodes if one node fails: silence is no sign of a bad node here.
            self.ended, self.live = True, []
            return
        self.silent.update(dict.fromkeys(missing, reason))
        self.live = [name for name in self.live if name not in missing]

    def _answers(self, asked: Sequence[str], seconds: float) -> dict[str, Any]:
        """Return the values of the last order, of the nodes that have finished it."""
        waiting, end = set(asked), time.monotonic() + seconds
        parts: dict[str, list[Any]] = {}
        found: dict[str, Any] = {}
        while waiting and (left := end - time.monotonic()) > 0:
            answer = self._processes.hear(left)
            if answer is None:
                break
            name = answer.get("node")
            if answer.get("number") != self._number or name not in waiting:
                continue
            if "part" in answer:
                parts.setdefault(name, []).append(answer["part"])
                continue
            found[name] = answer.get("value", parts.get(name, []))
            waiting.discard(name)
        return found


Begin = Callable[[Sequence[str]], Processes]
"""Starts an agent on each of the given nodes."""


def start(begin: Begin, names: Sequence[str], seconds: float) -> Nodes:
    """Start an agent on each of ``names`` and wait for them.

    If a node does not take its task, srun ends the tasks of all nodes. The others are then started again
    without it.
    """
    nodes = Nodes(begin(names), names)
    try:
        nodes.meet(seconds)
        dead = not_launched(nodes.words(), names)
        if not dead or len(dead) == len(names):
            return nodes
    except BaseException:
        nodes.close()
        raise
    nodes.close()
    others = start(begin, [name for name in names if name not in dead], seconds)
    others.silent |= {name: f"{_LOST} ({dead[name]}); {_LOST_REMEDY}" for name in sorted(dead)}
    return others


def not_launched(words: str, nodes: Sequence[str]) -> dict[str, str]:
    """Return the ``nodes`` on which, according to srun, no task could start, each with srun's reason."""
    failed = re.findall(r"Task launch for \S+ failed on node (\S+?): *(.*)", words)
    return {node: reason.strip() for node, reason in failed if node in nodes}


def on_slurm(
    python: str | None = None,
    container: Container | None = None,
    environ: Mapping[str, str] | None = None,
) -> Begin:
    """Return the function that starts agents on nodes of this allocation, in the environment of a job."""
    box = container or Container()
    agent = [*box.prefix, python or box.python or sys.executable, *AGENT]
    own = {**box.env, **without_rank_requests(os.environ if environ is None else environ)}
    return lambda names: Processes([(helpers_command(names, CHECK, agent, box.srun_args), own)])


def here(names: Sequence[str]) -> Processes:
    """Start agents on this machine. Each name ``127.0.0.N`` is an address of this machine."""
    environ = {"GLOO_SOCKET_IFNAME": "lo"} | os.environ
    command = [sys.executable, *AGENT]
    return Processes([(command, environ | {"HPCRUN_CHECK_NAME": name}) for name in names])
