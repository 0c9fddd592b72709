"""Wait for a script: pass signals to it, and end it when a newer attempt owns the run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from hpcrun import exit_codes
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.script.copies import CopyWatch
from hpcrun.ranks.script.end import ProgressWatch
from hpcrun.ranks.signals import StopFlag, StopReason
from hpcrun.ranks.watchdog_process import NOTICED
from hpcrun.run import record
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import Hang, died_of_stop, last_output, record_hang
from hpcrun.run.files import read_json
from hpcrun.run.journal.events import Suspended
from hpcrun.run.journal.journal import Journal
from hpcrun.run.record import described

_TICK = 0.2


class ScriptWatch:
    """Waits for the script of one rank."""

    def __init__(
        self,
        child: "subprocess.Popen[bytes]",
        run: RunDirectory,
        attempt: Attempt,
        flag: StopFlag,
        config: DistributedConfig,
        warning: signal.Signals,
        progress: ProgressWatch,
        *,
        late_signal: float = 1.0,
        silent_after: float | None = None,
        owner_every: float = 5.0,
        copies: CopyWatch | None = None,
    ) -> None:
        """Watch ``child``.

        Args:
            warning: the signal to pass on for a warning.
            late_signal: seconds for which a signal to stop may arrive after the end of the script. The
                script, or a rank on another node, may receive a signal and end before this process receives
                it: even with exit code 0, which without a signal means that the work is done.
            silent_after: seconds without output of any rank after which rank 0 records a hang and kills the
                script; None: never.
            owner_every: seconds between two reads of ``owner.json`` in a small world.
            copies: prints a line if the ranks are separate trainings; None: another rank.
        """
        self._child, self._run, self._attempt, self._flag = child, run, attempt, flag
        self._signals = {StopReason.TERMINATE: signal.SIGTERM, StopReason.WARNING: warning}
        # Slurm and the local cluster signal every process of a step, so the script has received it too.
        self._pass_on = config.launch_method not in ("slurm", "local")
        self._passed_on = StopReason.NONE
        self._was_owner = False
        # All ranks together read the file at most a hundred times a second, each at another time.
        self._pause = max(owner_every, config.world_size / 100)
        self._owner_due = time.monotonic() + self._pause * config.rank / config.world_size
        self._reported: str | None = None
        self._rank, self._copies = config.rank, copies
        self._progress, self._late_signal = progress, late_signal
        self._silent_after = silent_after if config.rank == 0 else None
        self._logs = run.attempt_logs(attempt)
        self._next_look, self._last_sign = 0.0, time.time()
        self._last_step: int | None = None
        # Rank 0 has claimed the run; the other ranks read the owner from the first file of their attempt.
        self._incarnation = record.INCARNATION if config.rank == 0 else None

    def wait(self, grace: float) -> int:
        """Return the script's exit code, -n for signal n.

        Args:
            grace: seconds that processes which outlive a wrapper have to end after a stop signal.
        """
        while True:
            self._hear_signals()
            self._yield_to_successor()
            self._progress.look()
            self._end_silence()
            if self._copies is not None:
                self._copies.look()
            began = time.monotonic()
            try:
                code = self._child.wait(timeout=_TICK)
            except subprocess.TimeoutExpired:
                self._note_suspension(time.monotonic() - began - _TICK)
                continue
            deadline = time.monotonic() + self._late_signal
            while not self._flag.reason and time.monotonic() < deadline:
                time.sleep(_TICK / 4)
            if self._copies is not None and code == 0:
                self._copies.look(ended=True)
            if self._flag.reason:
                self._progress.stop_received()
            if self._flag.reason and died_of_stop(code):
                # The scheduler kills the remaining processes of a rank as soon as this process ends.
                return code_of_all(code, wait_for_orphans(grace))
            return code

    def _note_suspension(self, seconds: float) -> None:
        if seconds > NOTICED and self._rank == 0:
            self._last_sign = time.time()
            print(
                f"hpcrun: was suspended for {seconds:.0f} s; continues", file=sys.stderr, flush=True
            )
            suspended = Suspended(attempt=self._attempt, seconds=round(seconds, 3))
            Journal(self._run).note(suspended)

    def _end_silence(self) -> None:
        """Record a hang and kill the script after too long a time without output or a new reported step."""
        now = time.time()
        if self._silent_after is None or self._flag.reason or now < self._next_look:
            return
        self._next_look = now + max(1.0, self._silent_after / 60)
        if self._progress.step != self._last_step:
            self._last_step, self._last_sign = self._progress.step, now
        try:
            newest = last_output(self._logs)
        except OSError as error:
            self._report_once(f"the logs cannot be read now: {error.strerror}; looking again")
            return
        # The debug executor writes no logs of the ranks.
        self._last_sign = now if newest is None else max(self._last_sign, newest)
        if now - self._last_sign <= self._silent_after:
            return
        line = f"no rank printed anything for {self._silent_after:g} s (job.silent_after)"
        print(f"hpcrun: {line}; the script is ended", file=sys.stderr, flush=True)
        try:
            record_hang(self._logs, Hang(None, None, self._last_sign, self._progress.step, line))
        except OSError as error:
            print(f"hpcrun: the hang is not recorded: {error}", file=sys.stderr, flush=True)
        self._child.kill()

    def _hear_signals(self) -> None:
        reason = self._flag.reason
        if reason:
            self._progress.stop_received()
        if self._pass_on and reason > self._passed_on:
            self._passed_on = reason
            self._child.send_signal(self._signals[reason])
            name = self._signals[reason].name
            print(f"hpcrun: passed {name} to the script", file=sys.stderr, flush=True)

    def _yield_to_successor(self) -> None:
        """End a superseded script: a stale process would write into the newer attempt's files."""
        if time.monotonic() < self._owner_due:
            return
        self._owner_due = time.monotonic() + self._pause
        try:
            owner = read_json(self._run.owner) or {}
        except OSError as error:
            # A file system error does not show who owns the run.
            self._report_once(f"owner.json cannot be read now: {error.strerror}; looking again")
            return
        mine = self._is_mine(owner)
        # A client of a network file system may show an older owner for a while, but never after our own.
        if self._was_owner and "owner" in owner and not mine:
            line = f"{described(owner)} owns the run now; the script is ended"
            print(f"hpcrun: {line}", file=sys.stderr, flush=True)
            self._child.kill()
        self._was_owner = self._was_owner or mine

    def _is_mine(self, owner: Mapping[str, Any]) -> bool:
        here, there = os.environ.get("SLURM_CLUSTER_NAME"), owner.get("cluster")
        if owner.get("owner") != self._attempt.owner or (here and there and here != there):
            return False
        incarnation = owner.get("incarnation")
        if self._incarnation is None:
            self._incarnation = incarnation
        return bool(incarnation == self._incarnation)

    def _report_once(self, line: str) -> None:
        if line != self._reported:
            print(f"hpcrun: {line}", file=sys.stderr, flush=True)
        self._reported = line


_ORPHANS_TICK = 0.1


def wait_for_orphans(patience: float) -> list[int]:
    """Wait until no child is left, for ``patience`` seconds at most.

    Call it when no other code waits for a child of this process. Returns the exit codes of the children
    that ended, -n for signal n.
    """
    codes: list[int] = []
    late = time.monotonic() + patience
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if pid:
            codes.append(os.waitstatus_to_exitcode(status))
        elif time.monotonic() >= late:
            return codes
        else:
            time.sleep(_ORPHANS_TICK)


def code_of_all(wrapper: int, orphans: Iterable[int]) -> int:
    """Return the exit code of a script after its ``wrapper`` died of the stop signal.

    A process that outlived the wrapper and ended by itself is the program that the wrapper had started.
    """
    ended = set(orphans)
    for code in (exit_codes.UNFINISHED, exit_codes.DONE):
        if code in ended:
            return code
    return wrapper
