"""The agent of a node: ``python -m hpcrun.nodes.agent``, one light process for the whole job.

It sends a beat every second to the batch step, so that the loss of the node is noticed within seconds. It
also runs programs for the batch step, such as the probes of a spare node. It ends with the batch step.

The first line of standard input, which srun forwards to each node, has the batch step's addresses, port and
key, and what the ranks of the job use on their node: ``memory``, the key of the keeper of files in memory,
and ``fork``, the name of the fork server, with ``python``, its interpreter. Each later message is a JSON line
on the connection.
"""

import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from hpcrun import slurm
from hpcrun.descendants import die_with_parent
from hpcrun.errors import ClusterError
from hpcrun.nodes.kill_ranks import kill_processes
from hpcrun.nodes.lines import Connection
from hpcrun.ranks.addresses import listen
from hpcrun.ranks.fork_messages import fork_server_command
from hpcrun.run import memory_keeper
from hpcrun.slurm.notation import expand
from hpcrun.slurm.placement import job_id

FORK_PROGRAM = "fork server"
"""The name of the fork server among the programs of an agent."""
BEAT = 1.0
"""Seconds between two beats."""
END = b"end\n"
"""The last line of standard input. Without it, the batch step has not ended: its node may be lost."""
_CONNECT = 3.0
# Seconds without an answer to the beats, after which the connection is made again.
_SILENT = 10.0
_ALONE = 30.0
# Seconds between two questions to the controller, of an agent without a batch step.
_ASK = 10.0
_PAUSE = 0.5
_FORK_DELAY = 15.0
_OUTPUT = 1 << 18
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Programs:
    """The programs that the agent runs; each has a name and is the leader of its process group."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes] | None]] = {}

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        output: str | None = None,
        nice: int = 0,
        folder: str | None = None,
    ) -> None:
        """Start a program in place of one with the same name.

        Args:
            env: variables in addition to those of the agent.
            output: a file for its output; None: the output is returned at its end.
            folder: its working folder; None: that of the agent.

        Raises:
            OSError: the program or the file cannot be opened.
        """
        self.stop(name)
        kept = tempfile.TemporaryFile() if output is None else None  # noqa: SIM115
        with contextlib.ExitStack() as files:
            out: IO[bytes] | None = kept
            if output is not None:
                out = files.enter_context(open(output, "ab"))  # noqa: PTH123
            command = [*(["nice", "-n", str(nice)] if nice else []), *argv]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL if output is None else subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=folder,
                start_new_session=True,
                preexec_fn=_begin_child,
            )
        self._running[name] = process, kept

    def stop(self, name: str) -> None:
        """Kill a program and its process group, and wait for its end."""
        process, kept = self._running.pop(name, (None, None))
        if process is not None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if kept is not None:
            kept.close()

    def number_of(self, name: str) -> int | None:
        """Return the process number of a program, or None."""
        process, _ = self._running.get(name, (None, None))
        return process.pid if process else None

    def ended(self) -> list[dict[str, Any]]:
        """Return a message for each program that has ended since the last call."""
        over = [name for name, (process, _) in self._running.items() if process.poll() is not None]
        found = []
        for name in over:
            process, kept = self._running.pop(name)
            output = ""
            if kept is not None:
                with kept:
                    kept.seek(0)
                    output = kept.read(_OUTPUT).decode(errors="replace")
            found.append({"ended": name, "code": process.returncode, "output": output})
        return found

    def close(self) -> None:
        """Kill all programs."""
        for name in list(self._running):
            self.stop(name)


def _begin_child() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()


class NodeAgent:
    """A node, for the batch step: beats, and obeys the messages of its connection."""

    def __init__(self, node: str, addresses: Sequence[str], port: int, key: str) -> None:
        self._node, self._addresses, self._port, self._key = node, addresses, port, key
        self._programs = Programs()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._heard = 0.0
        self._door = listen([0])

    def run(self) -> None:
        """Serve until the end of the job; outside of one, until the batch step has been away for 30 s."""
        self._heard, asked = time.monotonic(), 0.0
        threading.Thread(target=_answer, args=(self._door,), daemon=True).start()
        while True:
            connection = self._connect()
            if connection is not None:
                with connection.link, contextlib.suppress(OSError):
                    self._serve(connection)
            time.sleep(_PAUSE)
            if time.monotonic() - self._heard < _ALONE:
                continue
            if "SLURM_JOB_ID" not in os.environ:
                return
            if time.monotonic() - asked > _ASK:
                requeue_without_batch_host(self._node, os.environ)
                asked = time.monotonic()

    def start_fork_server(self, name: str, python: str | None) -> None:
        """Start the fork server of this node; raises OSError."""
        command = fork_server_command(name, python=python, parent=os.getpid(), delay=_FORK_DELAY)
        self._programs.start(FORK_PROGRAM, command, output=os.devnull)

    def close(self) -> None:
        """End the programs of the agent."""
        self._programs.close()

    def _connect(self) -> Connection | None:
        for address in self._addresses:
            with contextlib.suppress(OSError):
                link = socket.create_connection((address, self._port), _CONNECT)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return Connection(link)
        return None

    def _serve(self, connection: Connection) -> None:
        """Beat and obey until the connection ends; the batch step answers every beat."""
        port = self._door.getsockname()[1]
        connection.send({"key": self._key, "node": self._node, "door": port})
        due, silent = 0.0, time.monotonic() + _SILENT
        while time.monotonic() < silent:
            if time.monotonic() >= due:
                connection.send({"beat": time.time()})
                due = time.monotonic() + BEAT
            answers = [self._answers.get() for _ in range(self._answers.qsize())]
            for message in [*self._programs.ended(), *answers]:
                connection.send(message)
            ready, _, _ = select.select([connection.link], [], [], BEAT / 4)
            if not ready:
                continue
            messages = connection.receive()
            if messages is None:
                return
            self._heard = time.monotonic()
            silent = self._heard + _SILENT
            for message in messages:
                self._obey(message)

    def _obey(self, message: Mapping[str, Any]) -> None:
        order, arguments = message.get("do"), message.get("with") or {}
        if order == "end":
            self.close()
            os._exit(0)
        elif order == "ping":
            self._answers.put({"pong": True})
        elif order == "start":
            try:
                self._programs.start(**arguments)
            except OSError as error:
                facts = {"ended": arguments.get("name"), "code": 127, "output": str(error)}
                self._answers.put(facts)
        elif order == "stop":
            self._programs.stop(**arguments)
            self._answers.put({"stopped": arguments["name"]})
        elif order == "kill":
            threading.Thread(target=self._kill, kwargs=dict(arguments), daemon=True).start()
        elif order == "reach":
            threading.Thread(target=self._reach, kwargs=dict(arguments), daemon=True).start()

    def _kill(self, steps: Sequence[int], seconds: float) -> None:
        server = self._programs.number_of(FORK_PROGRAM)
        left = kill_processes(steps, os.environ, server, seconds)
        self._answers.put({"killed": list(steps), "left": left})

    def _reach(self, peers: Sequence[Sequence[Any]]) -> None:
        """Report whether the agents of all ``peers``, each an address and a port, are reached."""
        reached = False
        with contextlib.suppress(OSError):
            for address, port in peers:
                socket.create_connection((address, port), _CONNECT).close()
            reached = True
        self._answers.put({"reached": reached})


def requeue_without_batch_host(node: str, environ: Mapping[str, str]) -> bool:
    """Requeue a job that Slurm keeps although the node of its batch script is lost; return True if so.

    Slurm does so in a person's own batch script with ``--no-kill`` (22.05 and 26.05): the job stays RUNNING
    until its time limit, and the controller no longer lists the batch host among its nodes. Of several agents
    only the first node's acts.
    """
    job = job_id(environ) or ""
    shown = slurm.run(slurm.scontrol_show_job_command(job))
    facts = slurm.parse_show_job(shown.stdout) if shown.returncode == 0 else {}
    if not must_requeue(node, facts, environ.get("SLURM_RESTART_COUNT") or "0"):
        return False
    return slurm.run(slurm.scontrol_requeue_command(job)).returncode == 0


def must_requeue(node: str, facts: Mapping[str, str], restarts: str) -> bool:
    """Return True if the job runs without its batch host and ``node`` is the first of its nodes.

    Args:
        facts: the fields of ``scontrol show job``.
        restarts: the restart count of the agent's own start.
    """
    try:
        left = expand(facts.get("NodeList", ""))
    except ClusterError:
        return False
    same = facts.get("JobState") == "RUNNING" and facts.get("Restarts") == restarts
    return same and "BatchHost" in facts and facts["BatchHost"] not in left and left[0] == node


def _answer(door: socket.socket) -> None:
    """Accept the connections by which other nodes reach this node."""
    while True:
        with contextlib.suppress(OSError):
            door.accept()[0].close()


def _end_with_input(agent: NodeAgent) -> None:
    """End this process when the batch step says so on standard input, or outside of a job closes it."""
    told = ""
    with contextlib.suppress(OSError, ValueError):
        while line := sys.stdin.readline():
            told = line
    if told.encode() == END or "SLURM_JOB_ID" not in os.environ:
        agent.close()
        os._exit(0)


def _serve_ranks(
    agent: NodeAgent, node: str, told: Mapping[str, Any]
) -> "subprocess.Popen[bytes] | None":
    """Start the fork server and the keeper of memory that the first line asks for; return the keeper.

    Both end with this process. Without them, ranks start and restore as in a new job.
    """
    keeper = None
    with contextlib.suppress(OSError):
        if told.get("memory"):
            keeper = memory_keeper.start(f"{told['memory']}/{node}")
    with contextlib.suppress(OSError):
        if told.get("fork"):
            agent.start_fork_server(told["fork"], told.get("python"))
    return keeper


def main() -> None:
    """Serve as the agent of this node."""
    for number in _IGNORED:
        # These warn or end the ranks, and reach every process of the job; the batch step ends the agents.
        signal.signal(number, signal.SIG_IGN)
    told = json.loads(sys.stdin.readline() or "{}")
    if not told:
        return
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    agent = NodeAgent(node, told["addresses"], told["port"], told["key"])
    keeper = _serve_ranks(agent, node, told)
    threading.Thread(target=_end_with_input, args=(agent,), daemon=True).start()
    agent.run()
    agent.close()
    if keeper is not None:
        keeper.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
