"""The nodes of a job during its steps: a lost node ends the step, and spare nodes are checked."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpcrun import slurm
from hpcrun.errors import ClusterError
from hpcrun.nodes.agent import FORK_PROGRAM
from hpcrun.nodes.kill_ranks import end_sruns
from hpcrun.nodes.lines import helpers_command
from hpcrun.nodes.spare_probe import PROBE, SpareProbe, probe_command
from hpcrun.nodes.step_nodes import (
    JobShape,
    choose_nodes,
    replacements,
    step_options,
    step_variables,
)
from hpcrun.nodes.watch import AgentProcess, AgentStep, NodeWatch
from hpcrun.ranks.addresses import is_loopback
from hpcrun.ranks.fork_messages import FORK_SERVER, fork_server_command
from hpcrun.run import memory_keeper
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import NodeLost, Replaced, SpareLost, SpareUnfit
from hpcrun.run.journal.journal import Journal
from hpcrun.slurm.avoided_nodes import add_failure, bad_nodes_path
from hpcrun.slurm.environment import without_rank_requests
from hpcrun.slurm.notation import AGENTS, STEPS, expand

if TYPE_CHECKING:
    from hpcrun.diagnose.causes import Diagnosis

_AGENT = ("-m", "hpcrun.nodes.agent")
_OF_ALL_NODES = ("SLURM_GPUS", "SLURM_GPUS_PER_SOCKET")
# Seconds in which srun may end after its step was ended; it would wait seven for the lost node.
_SRUN = 1.0
_CONTROLLER = 5.0
# Seconds in which a killed rank ends; the memory of a GPU takes a while.
_KILL = 20.0
_OF_THE_BATCH_STEP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_STOP = 3.0


def agents_command(nodes: Sequence[str]) -> list[str]:
    """Build the srun of one agent per node."""
    return helpers_command(nodes, AGENTS, [sys.executable, *_AGENT], ["--mpi=none"])


def begin_agents(nodes: Sequence[str], told: Mapping[str, Any]) -> AgentStep:
    """Start an agent on each node by srun."""
    environ = without_rank_requests(os.environ)
    # A job that has lost a node has fewer GPUs.
    environ = {name: value for name, value in environ.items() if name not in _OF_ALL_NODES}
    return AgentProcess(agents_command(nodes), environ, told)


@dataclass(frozen=True)
class RankHelpers:
    """Processes of each node that outlive the ranks: see ``memory_keeper.py`` and ``fork_server.py``.

    ``memory``: the key of the keepers. ``fork``: the name of the fork servers. ``python``: the interpreter of
    the ranks; None: that of this process.
    """

    memory: str | None = None
    fork: str | None = None
    python: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """The variables by which the ranks find them."""
        found = {memory_keeper.VARIABLE: self.memory, FORK_SERVER: self.fork}
        return {name: value for name, value in found.items() if value}


class JobNodes:
    """The nodes of this job.

    Args:
        attempt: the first attempt; :meth:`next_step` names each later one.
        own: the node of this process.
        gpus: GPUs per node that a spare node must have.
        helpers: what the agents start for the ranks.

    Attributes:
        bad: the nodes that no step uses any more, each with the reason.
        used: the nodes of the newest step.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        shape: JobShape,
        own: str,
        *,
        gpus: int = 0,
        helpers: RankHelpers | None = None,
    ) -> None:
        self.helpers = helpers or RankHelpers()
        self.shape, self.bad, self.used = shape, dict[str, str](), tuple[str, ...]()
        self._suspects: dict[str, str] = {}
        self._prepared: set[str] = set()
        self._lost: set[str] = set()
        self._left: dict[tuple[str, tuple[int, ...]], int] = {}
        self._run, self._attempt, self._gpus = run, attempt, gpus
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        self._probes: dict[str, SpareProbe] = {}
        self._closing = threading.Event()
        self._watch = NodeWatch(
            shape.nodes,
            own,
            begin_agents,
            lose=self.lose,
            heard=self._hear,
            answers=self._controller_answers,
            port_key=f"{attempt.job} agents",
            orders=asdict(self.helpers),
        )
        self._thread: threading.Thread | None = None
        self._variables: int | None = None
        self._forking: set[str] = set()

    def _start(self) -> None:
        """Start the agents, and the probes of the nodes that no step uses."""
        from hpcrun.ranks.interfaces import rendezvous_addresses

        self._thread = threading.Thread(target=self._check_spares, daemon=True)
        # A thread that does not block them would take the signals for which the batch step looks.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_BATCH_STEP)
        try:
            self._watch.start(rendezvous_addresses(os.environ))
            self._thread.start()
        except (ClusterError, OSError, RuntimeError) as error:
            # For example, no port or no thread is left.
            _say(f"only Slurm notices a lost node: {error}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the agents."""
        self._closing.set()
        self._watch.close()
        if self._variables is not None:
            os.close(self._variables)

    def variables_file(self) -> int | None:
        """Return the descriptor of a file in memory for the variables of the next ranks; None: not needed.

        The fork server of a spare node needs them: no rank has run there.
        """
        if self.helpers.fork is None or self.used == self.shape.nodes:
            return None
        if self._variables is None:
            self._variables = os.memfd_create("hpcrun variables")
        os.ftruncate(self._variables, 0)
        os.lseek(self._variables, 0, os.SEEK_SET)
        return self._variables

    def next_step(self, attempt: Attempt) -> tuple[str, ...]:
        """Choose the nodes of the next step, record the replacements, and end the probes there.

        Raises:
            ClusterError: too few nodes are left.
        """
        with contextlib.suppress(OSError):
            opened = Journal(self._run).read().has_opened(self._attempt)
            self._prepared |= set(self.used) if opened else set()
        with self._lock:
            chosen = choose_nodes(self.shape, self.bad, self.used, self._suspects)
            if chosen is None:
                why = "; ".join(f"{node}: {reason}" for node, reason in self.bad.items())
                raise ClusterError(f"too few nodes are left: {why}")
            before, self.used, self._attempt = self.used, chosen, attempt
        for node, new in replacements(before, chosen):
            reason = self.bad.get(node) or self._suspects.get(node, "")
            replaced = Replaced(attempt=attempt, lost=node, by=new, reason=reason)
            Journal(self._run).note(replaced)
            place = f"{new} replaces {node}" if new else f"the step continues without {node}"
            _say(f"{place}: {reason}")
        self._free(chosen)
        return chosen

    def without_bad_nodes(
        self,
        left: Sequence[str],
        dead: Sequence[str],
        avoided: Sequence[str],
        diagnosis: "Diagnosis | None",
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Return the dead and avoided nodes that prevent the next step; none if enough others are left.

        A node with one failure is replaced too, if a spare node is left.

        Args:
            left: nodes that Slurm counts as the job's; empty if unknown.
            dead: nodes that are down.
            avoided: nodes that the next start must exclude.
        """
        from hpcrun.diagnose.causes import blames_node

        gone = [node for node in self.shape.nodes if left and node not in left]
        unfit = diagnosis.unfit if diagnosis else ()
        with self._lock:
            for nodes, reason in (
                (gone, "Slurm has taken it out of the job"),
                (dead, "Slurm starts no step there"),
                (avoided, "it failed too often"),
                (unfit, diagnosis.line if diagnosis else ""),
            ):
                self.bad |= {node: reason for node in nodes if node not in self.bad}
            if diagnosis and diagnosis.host and blames_node(diagnosis):
                self._suspects[diagnosis.host] = diagnosis.line
            enough = choose_nodes(self.shape, self.bad, self.used, self._suspects) is not None
        if enough:
            return (), ()
        lost = [node for node in self.shape.nodes if node in self._lost or node in gone]
        return list(dict.fromkeys([*dead, *lost])), avoided or list(self.bad)

    @property
    def has_lost_step(self) -> bool:
        """True if a node of the newest step is lost, so that Slurm cannot end this step."""
        return not self._lost.isdisjoint(self.used)

    def options(self) -> list[str]:
        """Return the options of each srun of the newest step; none for all nodes of the job."""
        if self.used == self.shape.nodes:
            return []
        return step_options(self.shape, self.used, overlap=bool(self._lost))

    def variables(
        self, environ: Mapping[str, str], nodes: Sequence[str] | None = None
    ) -> Mapping[str, str]:
        """Return ``environ`` as in a job that has only ``nodes``, by default those of the newest step."""
        nodes = self.used if nodes is None else nodes
        if nodes == self.shape.nodes:
            return environ
        return step_variables(environ, self.shape, nodes)

    @property
    def unprepared(self) -> Sequence[str]:
        """Nodes of the newest step on which no attempt has opened the run yet."""
        return [node for node in self.used if node not in self._prepared]

    @contextlib.contextmanager
    def watch_step(self, child: "subprocess.Popen[bytes]") -> Iterator[None]:
        """End the step of ``child`` when a node of the step is lost; at its end, wait for the decision.

        The process ``child`` has the srun of the ranks among its descendants.
        """
        with self._lock:
            self._child = child
        if self._thread is None:
            # Here, so that the start of the ranks does not wait for it.
            self._start()
        if self.has_lost_step:
            self._end_step(child)
        try:
            yield
        finally:
            with self._lock:
                self._child = None
            self._watch.decided(self.used)

    def lose(self, node: str, reason: str) -> None:
        """Record that a node is lost, and end the step if the step uses the node.

        Slurm may have started the job again, because this node had no network: the steps and the nodes are
        those of the new start then.
        """
        if self._is_superseded():
            return
        with self._lock:
            self.bad.setdefault(node, reason)
            self._lost.add(node)
            child = self._child if node in self.used else None
            used, attempt = node in self.used, self._attempt
        lost = (
            NodeLost(attempt=attempt, host=node, reason=reason)
            if used
            else SpareLost(attempt=attempt, host=node, reason=reason)
        )
        Journal(self._run).note(lost)
        _say(f"{node} is lost: {reason}")
        with contextlib.suppress(OSError):
            add_failure(bad_nodes_path(), node, reason, str(self._run.path), attempt.owner)
        # In other threads, because the watch must continue.
        if child is not None:
            threading.Thread(target=self._end_step, args=(child,), daemon=True).start()
        threading.Thread(target=self.leave_lost_nodes, daemon=True).start()

    def leave_lost_nodes(self) -> None:
        """Take the lost nodes out of Slurm's job, if a step on the other nodes may follow.

        Otherwise Slurm requeues the job when it notices a loss. It must do so for the batch host: so the job
        has no ``--no-kill``, with which Slurm would keep it without its batch script until its time limit.
        """
        with self._lock:
            enough = choose_nodes(self.shape, self.bad, self.used, self._suspects) is not None
            lost, attempt = set(self._lost), self._attempt
        while enough:
            words = leave_nodes(attempt, lost)
            if words is None:
                return
            if slurm.classify_requeue_error(words) != "transient":
                _say(f"Slurm requeues the job when it notices the loss: {words}")
                return
            enough = not self._closing.wait(_CONTROLLER)

    def _is_superseded(self) -> bool:
        """Return True if a newer start of the job is known to the controller."""
        show = slurm.scontrol_show_job_command(self._attempt.job)
        shown = slurm.run(show, timeout=_CONTROLLER)
        restarts = slurm.parse_show_job(shown.stdout).get("Restarts", "")
        return restarts.isdecimal() and int(restarts) > self._attempt.restart

    def _controller_answers(self) -> bool:
        show = slurm.scontrol_show_job_command(self._attempt.job)
        return slurm.run(show, timeout=_CONTROLLER).returncode == 0

    def _end_step(self, child: "subprocess.Popen[bytes]") -> None:
        """Kill the ranks on the other nodes, which wait for the lost node, and their srun."""
        steps = self._steps()
        for step in steps or ():
            slurm.run(slurm.scancel_command(self._attempt.job, step=step), timeout=_CONTROLLER)
        # srun may end its step itself.
        end_sruns(child, _SRUN, ask=steps is None)

    def _steps(self) -> list[int] | None:
        """Return hpcrun's steps in the job without the agents; None if the controller does not answer."""
        command = slurm.squeue_steps_command(self._attempt.job)
        listed = slurm.run(command, timeout=_CONTROLLER)
        if listed.returncode != 0:
            return None
        agents = slurm.parse_steps(listed.stdout, AGENTS)
        return [one for one in slurm.parse_steps(listed.stdout, begins=STEPS) if one not in agents]

    def end_lost_step(self) -> str | None:
        """End the ranks of a lost step on its living nodes; return why they may still run, or None.

        Slurm itself ends the step when it notices the loss, and a rank without a network may ignore SIGTERM.
        """
        steps = self._steps()
        return "the steps of the job are not known" if steps is None else self.kill_ranks(steps)

    def kill_ranks(self, steps: Sequence[int]) -> str | None:
        """Kill the ranks of ``steps`` through the agents; return why some may still run, or None."""
        living = [node for node in self.used if node not in self._lost]
        asked = {node: (node, tuple(steps)) for node in living}
        for node in living:
            self._left.pop(asked[node], None)
            if not self._watch.send(node, "kill", steps=list(steps), seconds=_KILL):
                return f"no agent can end the ranks on {node}"
        self._watch.wait(lambda: self._left.keys() >= {*asked.values()}, _KILL + _STOP)
        alive = [node for node in living if self._left.get(asked[node]) != 0]
        return f"ranks do not end on {', '.join(alive)}" if alive else None

    def _hear(self, node: str, message: Mapping[str, Any]) -> None:
        if "killed" in message:
            self._left[node, tuple(message["killed"])] = int(message["left"])
        probe = self._probes.get(node)
        if probe is not None:
            probe.hear(message)

    def _check_spares(self) -> None:
        command = probe_command(self._run.path, self._gpus)
        while not self._closing.wait(1.0):
            with self._lock:
                idle = [
                    node
                    for node in self._watch.connected()
                    if self.used and node not in self.used and node not in self.bad
                ]
                peers = [node for node in self.used if node not in self.bad]
            # The agent of this node may be connected by a loopback address.
            found = (self._watch.door(node) for node in peers)
            doors = [door for door in found if door and not is_loopback(door[0])][:2]
            for node in idle:
                self._prepare_forks(node)
                probe = self._probes.setdefault(node, SpareProbe())
                fault = probe.fault(time.monotonic())
                if fault is not None:
                    self._reject(node, fault)
                    continue
                for order, arguments in probe.orders(time.monotonic(), command, doors):
                    self._watch.send(node, order, **arguments)

    def _prepare_forks(self, node: str) -> None:
        """Let the fork server of a spare node import what a rank imports."""
        name = self.helpers.fork
        if name is None or node in self._forking or self._variables is None:
            return
        size = os.fstat(self._variables).st_size
        environ = read_variables(os.pread(self._variables, size, 0))
        threads = rank_threads(environ, self.shape.tasks)
        if threads is None:
            return
        self._forking.add(node)
        rank = ("-u", "-m", "hpcrun.worker")
        argv = fork_server_command(name, python=self.helpers.python, threads=threads, rank=rank)
        own = {key: value for key, value in environ.items() if not key.startswith("SLURM")}
        facts = {"env": own, "output": os.devnull, "folder": environ.get("PWD")}
        with self._lock:
            # The new server replaces the node's server, and ends its ranks.
            if node not in self.used:
                self._watch.send(node, "start", name=FORK_PROGRAM, argv=argv, **facts)

    def _reject(self, node: str, fault: str) -> None:
        with self._lock:
            if node in self.used:
                return
            self.bad.setdefault(node, fault)
        unfit = SpareUnfit(attempt=self._attempt, host=node, reason=fault)
        Journal(self._run).note(unfit)
        _say(f"the spare node {node} is unfit: {fault}")

    def _free(self, chosen: Sequence[str]) -> None:
        """Stop the probes on nodes that a step will use, and wait until their GPUs are free."""
        running = [node for node in chosen if node in self._probes and self._probes[node].running]
        for node in running:
            self._watch.send(node, "stop", name=PROBE)
        self._watch.wait(lambda: not any(self._probes[node].running for node in running), _STOP)
        for node in running:
            del self._probes[node]


def leave_nodes(attempt: Attempt, lost: Collection[str]) -> str | None:
    """Take the nodes ``lost`` out of the running job of ``attempt``; return Slurm's words if it does not.

    None: they are not in the job any more, or another start of the job runs.
    """
    shown = slurm.run(slurm.scontrol_show_job_command(attempt.job), timeout=_CONTROLLER)
    facts = slurm.parse_show_job(shown.stdout) if shown.returncode == 0 else {}
    if not facts:
        return shown.stderr or "timed out after a question to the controller"
    if (facts.get("JobState"), facts.get("Restarts")) != ("RUNNING", str(attempt.restart)):
        return None
    has = expand(facts["NodeList"]) if "NodeList" in facts else []
    left = [node for node in has if node not in lost]
    if left == has:
        return None
    told = slurm.run(slurm.scontrol_shrink_command(attempt.job, left), timeout=_CONTROLLER)
    return None if told.returncode == 0 else " ".join(told.stderr.split())


def read_variables(raw: bytes) -> dict[str, str]:
    """Return the variables that ``env -0`` has written; empty before it has ended."""
    if not raw.endswith(b"\0"):
        return {}
    pairs = (word.decode(errors="surrogateescape").partition("=") for word in raw.split(b"\0"))
    return {name: value for name, equal, value in pairs if equal}


def rank_threads(environ: Mapping[str, str], tasks: int) -> str | None:
    """Return OMP_NUM_THREADS of the ranks with these variables, if it follows from them.

    Args:
        tasks: tasks per node.
    """
    given = environ.get("OMP_NUM_THREADS") or environ.get("SLURM_CPUS_PER_TASK")
    cores = environ.get("SLURM_CPUS_ON_NODE", "")
    return given or (str(max(1, int(cores) // tasks)) if cores.isdecimal() else None)


def _say(words: str) -> None:
    print(f"hpcrun: {words}", flush=True)
