"""Any script at all: run a program that never heard of us as one rank.

It gets the variables that torchrun would have set, and every stop signal once. Whether it saves on a
signal is its own affair; that it was stopped, and is to be started again, is ours to know.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.command.launcher import Launcher
from hpcrun.diagnose.script_log import script_words
from hpcrun.errors import UserError
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.script_meeting import meeting_place
from hpcrun.lifecycle.sentry import NOTICED
from hpcrun.lifecycle.signals import StopFlag, StopReason
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import record_failure
from hpcrun.run.events import Attempt, note
from hpcrun.run.files import read_json
from hpcrun.run.owner import OwnerLooks
from hpcrun.run.rendezvous import MeetingBoard

_SIGNAL_OF = {StopReason.TERMINATE: signal.SIGTERM, StopReason.WARNING: signal.SIGUSR2}
# A shell ends with 128 + n where its child died of signal n.
_KILLED = frozenset(code for number in _SIGNAL_OF.values() for code in (-number, 128 + number))

_TICK = 0.2
# The script, or a peer on another node, may hear a signal, and end on it, before this process does: also
# with exit code 0, which without a signal means that its work is done.
_LATE_SIGNAL = 1.0
# A program that has run for as many seconds has read its arguments.
_WORKED = 60.0
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


class ScriptFailed(Exception):
    """The program ended with a failure; the text has its code and its last words."""


def run_script(
    command: Sequence[str],
    run: RunDirectory,
    attempt: Attempt,
    config: DistributedConfig,
    flag: StopFlag,
    *,
    timeout: float,
    interface: str | None = None,
    launcher: Launcher | None = None,
) -> int:
    """Run ``command`` as this rank's program and return the rank's exit code.

    That is the program's own (128 + n for signal n; 1 for a code that has a meaning of ours), but 0 once
    it has been told to stop: with another code the first rank to end would have srun kill those that
    still save. The event ``stopped``, written by rank 0, says that it was not the end.

    Args:
        timeout: seconds to wait for rank 0's port.
        interface: the network interfaces to use, as ``job.interface`` has them.
        launcher: starts the ranks of ``command``; None where this process is the rank.

    Raises:
        UserError: the program cannot be started.
        RunError: rank 0 published no port in time, or cannot be reached.
    """
    # It may set variables for gloo, hence before the environment is read.
    board = MeetingBoard(run, attempt, first=config.local_rank == 0)
    met = meeting_place(run, attempt, config, board, timeout, interface)
    environ = {
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        **launcher_variables(met, attempt),
        "HPCRUN_RUN": str(run.path),
        "HPCRUN_RESTART": str(attempt.restart),
    }
    words = launcher.words(command, environ) if launcher else [_program(command[0]), *command[1:]]
    try:
        child = subprocess.Popen(words, env=environ, preexec_fn=_die_with_parent)
    except OSError as error:
        raise UserError(
            f"{command[0]}: cannot be started: {error.strerror}; check the path after `--`"
        ) from error
    if config.rank == 0:
        note(run, "started", attempt)
    before = time.monotonic()
    code = _Watch(child, run, attempt, flag, config).wait()
    board.clear()
    if flag.reason:
        how = f"{flag.reason.name.lower()}, its exit code {code}"
        print(f"hpcrun: the script was told to stop ({how})", file=sys.stderr, flush=True)
        if config.rank == 0:
            cause = flag.reason.name.lower()
            killed = {"killed": True} if code in _KILLED else {}
            note(run, "stopped", attempt, cause=cause, committed=True, exit_code=code, **killed)
        return exitcodes.DONE
    if code:
        _record(run, attempt, config.rank, command, code)
    worked = attempt.restart > 0 or time.monotonic() - before > _WORKED
    return _own_code(code if code >= 0 else 128 - code, worked=worked)


def _own_code(code: int, *, worked: bool) -> int:
    """The exit code of a rank whose program ended with ``code``, which knows nothing of our codes.

    A program that is refused at its first start (argparse: 2) will be refused again. In one that has
    worked before, 2 is a failure like others: Python cannot open a file on a file server that is away.
    """
    ours = {exitcodes.SAVE_FAILED, exitcodes.UNFINISHED} | (
        {exitcodes.BAD_INPUT} if worked else set()
    )
    return exitcodes.FAILED if code in ours else code


def launcher_variables(config: DistributedConfig, attempt: Attempt) -> dict[str, str]:
    """What torchrun sets for its ranks (torch.distributed.run, "Environment Variables").

    All of it and not only what ``env://`` reads: Lightning and Accelerate take the run id for the sign
    that somebody else has started the ranks.
    """
    variables = config.to_env_dict()
    if config.launch_method == "torchrun":
        return variables
    return variables | {
        "GROUP_WORLD_SIZE": str(config.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(config.rank),
        "ROLE_WORLD_SIZE": str(config.world_size),
        "TORCHELASTIC_RUN_ID": attempt.job,
        # A requeue is no restart of torchrun's, which has nothing to do with this job.
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # There is no agent that holds the store: rank 0 does.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


class _Watch:
    """Waits for the script: passes signals on, and ends it when a newer attempt has taken over."""

    def __init__(
        self,
        child: "subprocess.Popen[bytes]",
        run: RunDirectory,
        attempt: Attempt,
        flag: StopFlag,
        config: DistributedConfig,
    ) -> None:
        self._child, self._run, self._attempt, self._flag = child, run, attempt, flag
        # Slurm and the local cluster signal every process of a step, so the script has heard it too.
        self._pass_on = config.launch_method not in ("slurm", "local")
        self._passed_on = StopReason.NONE
        self._was_owner = False
        self._looks = OwnerLooks(config.rank, config.world_size)
        self._told: str | None = None
        self._rank = config.rank

    def wait(self) -> int:
        """The script's exit code, -n for signal n."""
        while True:
            self._pass_signals_on()
            self._yield_to_successor()
            began = time.monotonic()
            try:
                code = self._child.wait(timeout=_TICK)
            except subprocess.TimeoutExpired:
                self._note_suspension(time.monotonic() - began - _TICK)
                continue
            deadline = time.monotonic() + _LATE_SIGNAL
            while not self._flag.reason and time.monotonic() < deadline:
                time.sleep(_TICK / 4)
            return code

    def _note_suspension(self, seconds: float) -> None:
        """Record that Slurm had suspended the step, if a wait took ``seconds`` too long."""
        if seconds > NOTICED and self._rank == 0:
            print(
                f"hpcrun: was suspended for {seconds:.0f} s; goes on", file=sys.stderr, flush=True
            )
            note(self._run, "suspended", self._attempt, seconds=round(seconds, 3))

    def _pass_signals_on(self) -> None:
        reason = self._flag.reason
        if self._pass_on and reason > self._passed_on:
            self._passed_on = reason
            self._child.send_signal(_SIGNAL_OF[reason])
            print(f"hpcrun: passed {_SIGNAL_OF[reason].name} on", file=sys.stderr, flush=True)

    def _yield_to_successor(self) -> None:
        """A script knows no fence: the orphan of a dead node would write into its successor's files."""
        if not self._looks.due(time.monotonic()):
            return
        try:
            owner = (read_json(self._run.owner) or {}).get("owner")
        except OSError as error:
            # A file system that has trouble says nothing about who owns the run.
            self._tell_once(f"owner.json cannot be read now: {error.strerror}; looking again")
            return
        mine = owner == self._attempt.owner
        # A client of a network file system may show an older owner for a while, but not one after ours.
        if self._was_owner and owner is not None and not mine:
            print(f"hpcrun: {owner} has taken over; ending the script", file=sys.stderr, flush=True)
            self._child.kill()
        self._was_owner = self._was_owner or mine

    def _tell_once(self, line: str) -> None:
        if line != self._told:
            print(f"hpcrun: {line}", file=sys.stderr, flush=True)
        self._told = line


def _record(
    run: RunDirectory, attempt: Attempt, rank: int, command: Sequence[str], code: int
) -> None:
    """Leave a failure record, so that the rank that failed first can be told from those it took along."""
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    folder = run.attempt_logs(attempt.job, attempt.restart)
    words = script_words(folder / f"rank-{rank:05d}.log")
    failure = ScriptFailed(f"{' '.join(command)[:80]} ended with {how}{words and f': {words}'}")
    try:
        record_failure(folder, rank, failure, None)
    except OSError as error:
        print(f"hpcrun: the failure is not recorded: {error}", file=sys.stderr, flush=True)


def _program(name: str) -> str:
    """``name``, but our own interpreter for a `python` that is on no PATH (Debian, a job's shell)."""
    unnamed = name in ("python", "python3") and shutil.which(name) is None
    return sys.executable if unnamed else name


def _die_with_parent() -> None:
    """In the child: no launcher finds a script whose rank was killed (prctl(2))."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
