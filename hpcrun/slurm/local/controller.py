"""The local cluster's controller: one process per job, in the role of slurmctld and slurmd.

It starts the tasks, ends all tasks when one fails, signals them for a preemption, a cancellation or a time
limit, and restarts the job. It runs as ``python -m hpcrun.slurm.local.controller REQUEST`` in a new
session, so that the job outlives the terminal.

torchrun starts each rank in a new session. slurmstepd finds such processes in the container of
the step; here they are found by their environment.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpcrun.descendants import adopt_orphans, die_with_parent
from hpcrun.errors import UserError
from hpcrun.exit_codes import AGAIN_IN_PLACE, BAD_INPUT, UNFINISHED
from hpcrun.run import memory_keeper
from hpcrun.run.attempt import Attempt
from hpcrun.run.endings import Exit, record_exit
from hpcrun.run.trust import require_own_folder
from hpcrun.slurm.environment import scrub
from hpcrun.slurm.local.job_files import (
    CANCEL,
    KILL,
    PREEMPT,
    JobRequest,
    State,
    host_name,
    is_withdrawn,
    job_environment,
    own_status,
    private,
    released,
    step_environment,
    write_status,
)
from hpcrun.slurm.node_setup import node_setup_script


@dataclass
class Orders:
    """Requests to the controller by signal; set by handlers, read by the loop."""

    cancel: bool = False
    kill: bool = False
    preempt: bool = False

    def install(self) -> None:
        """Install the handlers."""

        def note(number: int, _frame: object) -> None:
            if number == CANCEL:
                self.cancel = True
            elif number == KILL:
                self.cancel = self.kill = True
            else:
                self.preempt = True

        for number in (CANCEL, KILL, PREEMPT):
            signal.signal(number, note)
        # Not SIG_IGN: the tasks would inherit it, and they must receive signals from any shell, as in Slurm.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _unmoved)


def _unmoved(_number: int, _frame: object) -> None:
    """Ignore a signal that is not meant for the controller."""


# Seconds of the time limit that an attempt needs after the warning before it, or it ends during its start.
_START_SECONDS = 60.0

_TICK = 0.05
# Seconds between two tries to write to a full disk.
_DISK = 2.0
# After the first failure the other tasks get this long to log their errors, then SIGKILL. The node with the
# first failed rank may end last: torchrun waits for its other ranks, and a task for a late signal.
_LAST_WORDS = 3.0


@dataclass
class _Task:
    rank: int
    host: str
    process: "subprocess.Popen[bytes]"
    code: int | None = None

    def signal(self, number: signal.Signals) -> None:
        """Signal the task and every process that it has started, as slurmstepd does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                mine = process.environ().get("SLURM_PROCID") == str(self.rank)
                if mine and os.getpgid(process.pid) != self.process.pid:
                    process.send_signal(number)


class LocalAttempt:
    """One attempt of the job: its tasks, from start to the last exit.

    ``warned``: the tasks have received the signal that announces the time limit.
    """

    def __init__(
        self, request: JobRequest, attempt: Attempt, orders: Orders, end: float | None
    ) -> None:
        """Prepare the attempt; ``end``: when its time limit is over (Unix seconds), if it has a limit."""
        self._request, self._orders, self._first = request, orders, not attempt.in_place
        self.folder = Path(request.folder) / f"restart-{attempt.label}"
        self.folder.mkdir(exist_ok=True)
        self.environ = scrub(os.environ) | job_environment(request, attempt) | request.env
        if end is not None:
            self.environ["SLURM_JOB_END_TIME"] = str(int(end))
        self._end = end
        self._kill_at: float | None = None
        self._failed = False
        self._ending: str | None = None
        self._warning = signal.Signals[f"SIG{request.warn_signal}"]
        self.warned = self._setting_up = False
        self.tasks: list[_Task] = []

    def may_begin(self) -> bool:
        """Run ``before`` of the request; return False if the attempt may not begin.

        A cancellation and the time limit end a program that hangs; they then end the tasks too.
        """
        if not self._request.before:
            return True
        process = subprocess.Popen(
            self._request.before,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        while process.poll() is None:
            if self._orders.cancel or (self._end is not None and time.time() >= self._end):
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TICK)
        return process.returncode != BAD_INPUT

    def stages(self) -> Iterator[str]:
        """Start the tasks of each stage in turn and yield its name; raises OSError if one cannot start."""
        request, per_node = self._request, self._request.tasks_per_node
        self._setting_up = True
        if request.node_setup and self._first:
            script = node_setup_script([*request.setup, *request.node_setup])
            self.tasks = []
            for node in range(request.nodes):
                log = self.folder / f"node-setup-{host_name(node)}.log"
                self.tasks.append(self._started(node * per_node, ["bash", "-c", script], log))
            yield "node_setup"
        if request.preflight and self._first:
            command = _with_setup(request, request.preflight)
            self.tasks = [self._started(0, command, self.folder / "preflight.log")]
            yield "preflight"
        self._setting_up = False
        command = _with_setup(request, request.command)
        self.tasks = []
        for rank in range(request.nodes * per_node):
            self.tasks.append(self._started(rank, command, self.folder / f"rank-{rank:05d}.log"))
        yield "tasks"

    def _started(self, rank: int, command: Sequence[str], path: Path) -> _Task:
        with open(path, "ab", opener=private) as log:
            process = subprocess.Popen(
                command,
                env=self.environ | step_environment(self._request, rank),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        return _Task(rank, host_name(rank // self._request.tasks_per_node), process)

    def wait(self) -> tuple[int, str | None]:
        """Watch until every task has ended.

        Returns:
            The highest exit code (128 + n for signal n), as srun computes it, and the cluster's
            reason if the cluster ended the attempt.
        """
        while any(task.code is None for task in self.tasks):
            self._obey()
            self._keep_time()
            self._reap()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal_all(signal.SIGKILL)
            time.sleep(_TICK)
        return max(task.code or 0 for task in self.tasks), self._ending

    def kill(self) -> None:
        """End every task immediately, and take the exit codes of adopted processes that have ended."""
        self._signal_all(signal.SIGKILL)
        tasks = {task.process.pid for task in self.tasks}
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if process.pid not in tasks and process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)

    def _obey(self) -> None:
        if self._orders.cancel and self._ending != "cancelled":
            self._terminate("cancelled")
        if self._orders.kill:
            self._kill_at = 0.0
        if self._orders.preempt:
            self._orders.preempt = False
            if self._ending is None:
                # `hpcrun preempt` sends the same signal on Slurm.
                self._terminate("preemption", self._warning)

    def _keep_time(self) -> None:
        if self._end is None or self._ending is not None:
            return
        if time.time() >= self._end:
            self._terminate("time-limit")
        elif time.time() >= self._end - self._request.signal_lead and not self.warned:
            self.warned = True
            self._signal_all(self._warning)

    def _terminate(self, why: str, number: signal.Signals = signal.SIGTERM) -> None:
        say(f"{why}: {number.name} to all tasks, SIGKILL after {self._request.grace:g} s")
        self._ending = why
        # slurmd does the same: a stopped process must run to receive a signal.
        self._signal_all(signal.SIGCONT)
        self._signal_all(number)
        self._kill_at = time.monotonic() + self._request.grace

    def _signal_all(self, number: signal.Signals) -> None:
        for task in self.tasks:
            if task.code is None:
                task.signal(number)

    def _reap(self) -> None:
        for task in self.tasks:
            if task.code is not None or (code := task.process.poll()) is None:
                continue
            task.code = code if code >= 0 else 128 - code
            ended = Exit(
                task.rank,
                task.host,
                time.time(),
                code if code >= 0 else None,
                -code if code < 0 else None,
                induced=self._failed or self._ending is not None,
            )
            with _full_disk_tolerated(f"the end of rank {task.rank}"):
                # The set-up of a node has no rank that ended.
                if task.code or not self._setting_up:
                    record_exit(self.folder, ended)
            # Processes that the task had started die with it, as in a step's container.
            task.signal(signal.SIGKILL)
            if task.code and not self._failed:
                self._failed = True
                say(f"rank {task.rank} on {task.host} ended with {_in_words(code)}")
                self._kill_at = self._kill_at or time.monotonic() + _LAST_WORDS


def run_job(request: JobRequest, orders: Orders) -> tuple[State, int]:
    """Run attempts until the last; return the job's final state and its number of restarts."""
    number = Attempt(request.job_id, 0)
    begins = None
    while begins is None and not orders.cancel:
        begins = released(_TICK)
    if not begins or is_withdrawn(Path(request.folder)):
        return "CANCELLED", 0
    end, keepers = _end_of(request), _Keepers(request)
    while True:
        if (problem := _replaced(request)) is not None:
            say(problem)
            return "FAILED", number.restart
        attempt = LocalAttempt(request, number, orders, end)
        attempt.environ |= keepers.variables
        try:
            code, word = _ran(request, attempt, number.restart)
        finally:
            attempt.kill()
        settle(request, "COMPLETING", number.restart, orders)
        asked = _after(request, attempt, code, word)
        if orders.cancel:
            return "CANCELLED", number.restart
        if asked == AGAIN_IN_PLACE and not orders.preempt and _time_left(request, end):
            number = number.following
            say("starts again at once")
            continue
        if asked not in (UNFINISHED, AGAIN_IN_PLACE):
            return ("COMPLETED" if code == 0 else "FAILED"), number.restart
        tell(request, "PENDING", number.restart)
        say(f"requeued; starts again in {request.requeue_delay:g} s")
        _wait_for_start(request.requeue_delay, orders)
        if orders.cancel:
            return "CANCELLED", number.restart
        # A waiting job cannot be preempted: earlier requests do not apply to the next attempt.
        orders.preempt = False
        number, end = Attempt(request.job_id, number.restart + 1), _end_of(request)
        keepers.renew()


def _replaced(request: JobRequest) -> str | None:
    """Return the reason why no attempt may begin: another user has put a folder in the run's place."""
    try:
        require_own_folder(request.run)
        require_own_folder(Path(request.folder))
    except UserError as error:
        return str(error)
    except OSError:
        # The start of the attempt reports it.
        return None
    return None


class _Keepers:
    """The keepers of memory of all nodes, for restarts without a requeue; they end with this process."""

    def __init__(self, request: JobRequest) -> None:
        self._request, self._running = request, list["subprocess.Popen[bytes]"]()
        self.variables: dict[str, str] = {}
        self.renew()

    def renew(self) -> None:
        """Start new keepers, for a new start of the job; without one, ranks read from the disk."""
        for keeper in self._running:
            keeper.kill()
            keeper.wait()
        key = memory_keeper.new_key()
        with contextlib.suppress(OSError):
            nodes = range(self._request.nodes)
            self._running = [memory_keeper.start(f"{key}/{host_name(node)}") for node in nodes]
            self.variables = {memory_keeper.VARIABLE: key}


def _end_of(request: JobRequest) -> float | None:
    """Return the end of the time limit of a job that starts now."""
    return time.time() + request.time_limit if request.time_limit else None


def _time_left(request: JobRequest, end: float | None) -> bool:
    return end is None or end - time.time() > request.signal_lead + _START_SECONDS


def _ran(request: JobRequest, attempt: LocalAttempt, restart: int) -> tuple[int, str | None]:
    """Set up the nodes, check them, and run the tasks; return the result of :meth:`LocalAttempt.wait`."""
    code, word = 0, None
    if not attempt.may_begin():
        return BAD_INPUT, None
    for stage in attempt.stages():
        tell(request, "RUNNING", restart, [task.process.pid for task in attempt.tasks])
        say(f"restart {restart}: {stage}: {len(attempt.tasks)} processes started")
        code, word = attempt.wait()
        if code or word is not None:
            break
    return code, word


def _after(request: JobRequest, attempt: LocalAttempt, code: int, word: str | None) -> int:
    """Run the request's ``after`` command; return its exit code."""
    if not request.after:
        return UNFINISHED if word == "preemption" else 0
    if not Path(request.folder).is_dir():
        say(f"{request.folder} is gone: the run was deleted, and the job ends")
        return 0
    if (problem := _replaced(request)) is not None:
        say(problem)
        return 0
    command = [*request.after, "--exit-code", str(code)]
    if word is not None:
        command += ["--scheduler", word]
    elif attempt.warned:
        command.append("--limit-near")
    return subprocess.run(command, env=attempt.environ, check=False).returncode


def _wait_for_start(delay: float, orders: Orders) -> None:
    until = time.monotonic() + delay
    while time.monotonic() < until and not orders.cancel:
        time.sleep(_TICK)


def _with_setup(request: JobRequest, command: Sequence[str]) -> list[str]:
    if not request.setup:
        return list(command)
    script = "\n".join(["set -e", *request.setup, 'exec "$@"'])
    return ["bash", "-c", script, "bash", *command]


def _in_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def say(text: str) -> None:
    """Print a line to the controller's log, if there is space for it."""
    with contextlib.suppress(OSError):
        print(f"hpcrun: {text}", flush=True)


def tell(request: JobRequest, state: State, restart: int, tasks: Sequence[int] = ()) -> bool:
    """Publish the job's state; on a full disk the old state remains, and the tasks continue."""
    if _replaced(request) is not None:
        return True
    with _full_disk_tolerated(f"state {state}"):
        write_status(Path(request.folder), own_status(request, state, restart, tasks))
        return True
    return False


def settle(request: JobRequest, state: State, restart: int, orders: Orders) -> None:
    """Publish a state after the tasks; wait for a disk that takes it, until a cancellation.

    A controller that ended without its last state would look killed. On a full or read-only disk the end of
    the attempt could not be recorded either.
    """
    while not tell(request, state, restart) and Path(request.folder).is_dir():
        if orders.cancel:
            return
        time.sleep(_DISK)


@contextlib.contextmanager
def _full_disk_tolerated(what: str) -> Iterator[None]:
    """Log an OSError instead of raising it: the controller must outlive a log that cannot be written."""
    try:
        yield
    except OSError as error:
        say(f"{what} is not written: {error}")


def main(arguments: Sequence[str]) -> None:
    """Run the job that the request file ``arguments[0]`` describes, and write its final state."""
    request = JobRequest.read(Path(arguments[0]))
    # Installed before any process knows the job: with the default action, an order would end it unrecorded.
    orders = Orders()
    orders.install()
    adopt_orphans()
    # The submitter waits for this first state: without it there is no job.
    write_status(Path(request.folder), own_status(request, "PENDING", 0, []))
    final: State = "FAILED"
    restart = 0
    try:
        final, restart = run_job(request, orders)
    finally:
        settle(request, final, restart, orders)
        say(f"job {request.job_id}: {final}")


if __name__ == "__main__":
    main(sys.argv[1:])
