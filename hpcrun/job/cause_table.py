"""The cause of an attempt's end, as a table: the first row with its evidence present decides.

The events come before the exit code: srun kills the other ranks as soon as a rank exits with a code, so the
highest of their codes may be 137 for any end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from hpcrun import exit_codes
from hpcrun.diagnose.causes import Diagnosis, signal_name
from hpcrun.job.scheduler_view import NO_ENDING, Ending
from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import (
    AttemptRefused,
    BadInput,
    Cause,
    CopiesFound,
    Finished,
    NodeLost,
    Opened,
    Saved,
    SaveFailed,
    Stopped,
)
from hpcrun.run.journal.state import State
from hpcrun.run.slow_nodes import STOPPED

_BY_SCHEDULER = {
    "preemption": Cause.PREEMPTION,
    "cancelled": Cause.CANCELLED,
    "time-limit": Cause.TIME_LIMIT,
    "node-failure": Cause.NODE_FAILURE,
}


# Slurm's signals to the ranks.
_BY_SIGNAL = ("SIGTERM", "SIGKILL")


@dataclass(frozen=True)
class Evidence:
    """Everything known about an end.

    ``own``: the state by the attempt's events. ``ending``: the scheduler's part, with the reason of
    a person in its place. ``diagnosis``: the first failure. ``unfinished``: a script has asked to be
    continued. ``of_node``: an error may concern some nodes only, and not the input. ``late_kill``: Slurm may
    have ended late what a node had run before its loss, see ``late_kills.py``.
    """

    own: State
    exit_code: int
    ending: Ending = NO_ENDING
    diagnosis: Diagnosis | None = None
    unfinished: bool = False
    of_node: bool = False
    late_kill: bool = False

    @property
    def word(self) -> str | None:
        """The reason for the end that Slurm or a person gave."""
        found = self.diagnosis
        # The ranks have not heard the signal: one of them failed later, for another reason.
        failed = found is not None and not found.follows and found.crash not in _BY_SIGNAL
        if self.ending.signalled and failed and not self.own.newest(Stopped):
            return None
        return self.ending.word

    @property
    def warned_by_term(self) -> bool:
        """True if a SIGTERM announced the time limit."""
        return self.ending.warned_by_term and self.ending.limit_near

    @property
    def script(self) -> bool:
        """True if the ranks run a program that reports no steps."""
        opened = self.own.newest(Opened)
        return opened is not None and bool(opened.script)

    @property
    def stopped(self) -> Stopped | None:
        """The agreed stop of all ranks, if there was one.

        If a rank of a script fails, srun ends the other ranks by SIGTERM. Such an end is not a stop.
        """
        found = self.own.newest(Stopped)
        by_srun = (
            self.script
            and found is not None
            and found.cause == "terminate"
            and self.ending.was_not_requested
            and self.word is None
            and not self.warned_by_term
        )
        failed = self.diagnosis is not None and not self.diagnosis.follows
        return None if by_srun and failed else found

    @property
    def stop_signal(self) -> str | None:
        """The reason of the agreed stop: terminate, warning or deadline."""
        if self.stopped is None:
            return None
        warned = self.stopped.cause == "terminate" and self.warned_by_term
        return "warning" if warned else self.stopped.cause

    def reason(
        self,
        kind: type[BadInput | CopiesFound | NodeLost | AttemptRefused | SaveFailed],
        otherwise: str,
    ) -> str:
        """Return the reason that the newest event of ``kind`` gives, or ``otherwise``."""
        event = self.own.newest(kind)
        return (event and event.reason) or otherwise

    @property
    def saved(self) -> str:
        """The outcome of the agreed stop, in words."""
        assert self.stopped is not None
        step, code = self.stopped.step, self.stopped.exit_code
        if not self.script and step is not None:
            return f"stopped and saved at step {step}"
        if step is not None:
            return f"the script saved step {step}"
        if code is None and self.stopped.has("exit_code"):
            return "the script had not started"
        if self.stopped.killed:
            return "the script died of the signal"
        if code == exit_codes.UNFINISHED:
            return f"the script stopped with exit code {code}, to be continued"
        if isinstance(code, int) and code < 0:
            return f"the script was killed by {signal_name(-code)}"
        return f"the script ended with exit code {code}"


@dataclass(frozen=True)
class Row:
    """One kind of evidence and the classification that follows: the cause, and one line about the end."""

    name: str
    holds: Callable[[Evidence], object]
    cause: Cause | Callable[[Evidence], Cause]
    line: str | Callable[[Evidence], str]


def evidence_of(
    state: State,
    attempt: Attempt,
    exit_code: int,
    ending: Ending,
    diagnosis: Diagnosis | None,
    *,
    unfinished: bool = False,
) -> Evidence:
    """Collect the evidence; a person's ``hpcrun cancel`` replaces Slurm's reason."""
    mine = state.of(attempt)
    if ending.word is None and mine.newest(Stopped) and state.asked_to_yield(attempt):
        ending = replace(ending, word="preemption")
    if state.asked_to_end(attempt):
        ending = replace(ending, word="cancelled", signalled=False)
    return Evidence(mine, exit_code, ending, diagnosis, unfinished)


def classify(evidence: Evidence) -> tuple[Cause, str]:
    """Return the cause of the end and one line about it."""
    row = deciding_row(evidence)
    cause = row.cause if isinstance(row.cause, Cause) else row.cause(evidence)
    return cause, row.line if isinstance(row.line, str) else row.line(evidence)


def deciding_row(evidence: Evidence) -> Row:
    """Return the first row with its evidence present; the last row always has it."""
    return next(row for row in TABLE if row.holds(evidence))


def _is_of_node(e: Evidence) -> bool:
    """Return True if the end was an error that other nodes may not have."""
    return e.of_node and (e.own.newest(BadInput) is not None or _bad_input(e))


def host_of(e: Evidence) -> str | None:
    """Return the node that failed first, if known."""
    lost, refused = e.own.newest(NodeLost), e.own.newest(BadInput)
    if lost:
        return str(lost.host)
    if refused and refused.host:
        return refused.host
    return e.diagnosis.host if e.diagnosis else None


def _by_scheduler(e: Evidence) -> Cause:
    return _BY_SCHEDULER[str(e.word)]


def _bad_input(e: Evidence) -> bool:
    # The exit code 2 may also come from a program that one node could not start.
    of_node = e.diagnosis is not None and e.diagnosis.node_fault
    found = e.diagnosis is not None and e.diagnosis.bad_input
    return found or (e.exit_code == exit_codes.BAD_INPUT and not of_node)


def _of_node_line(e: Evidence) -> str:
    refused = e.own.newest(BadInput)
    if refused:
        host = refused.host or ""
        reason = e.reason(BadInput, "bad input; the log says what")
        return reason if host in reason else f"{host}: {reason}"
    return _crash_line(e) if e.diagnosis else f"exit code {e.exit_code}; the logs say why"


def _bad_input_line(e: Evidence) -> str:
    found = e.diagnosis is not None and e.diagnosis.bad_input
    return e.diagnosis.line if e.diagnosis and found else "bad input; the log says what"


def _crash_line(e: Evidence) -> str:
    assert e.diagnosis is not None
    count = e.diagnosis.cascade
    others = f" ({count} other {'rank' if count == 1 else 'ranks'} then failed)" if count else ""
    return e.diagnosis.line + others


TABLE: tuple[Row, ...] = (
    Row(
        "the training has finished",
        lambda e: e.own.newest(Finished),
        Cause.FINISHED,
        "finished",
    ),
    Row(
        "a script has asked to be continued",
        lambda e: e.unfinished and e.exit_code == exit_codes.DONE and not e.stopped and not e.word,
        Cause.CONTINUED,
        f"the script asked to be continued (exit code {exit_codes.UNFINISHED})",
    ),
    Row(
        # The program may have ended well because Slurm asked it to end.
        "a script has ended well by itself",
        lambda e: e.script and e.exit_code == exit_codes.DONE and not e.stopped and e.word is None,
        Cause.FINISHED,
        lambda e: e.reason(CopiesFound, "the script ended with exit code 0 on all ranks"),
    ),
    Row(
        "a script has finished its work before a signal ended it",
        lambda e: e.script and e.exit_code == exit_codes.DONE and e.stopped and e.stopped.done,
        Cause.FINISHED,
        lambda e: f"the work is finished; then {e.saved}",
    ),
    Row(
        "the last checkpoint is not there",
        lambda e: (
            e.exit_code == exit_codes.SAVE_FAILED
            or (e.stopped and not e.script and not e.stopped.committed)
        ),
        Cause.SAVE_FAILED,
        lambda e: f"the last checkpoint was not written: {e.reason(SaveFailed, 'see the log')}",
    ),
    Row(
        "an agreed stop, for which Slurm gives a reason",
        lambda e: e.stopped and e.word in _BY_SCHEDULER,
        _by_scheduler,
        lambda e: f"{e.word}: {e.saved}",
    ),
    Row(
        "an agreed stop to replace a slow node",
        lambda e: e.stop_signal == STOPPED,
        Cause.NODE_FAILURE,
        lambda e: f"{e.diagnosis.line if e.diagnosis else 'a slow node'}; {e.saved}",
    ),
    Row(
        # For example the late end of an earlier step: srun ends steps by name, and both have that name.
        "an agreed stop by a SIGTERM that was not a cancellation",
        lambda e: e.stop_signal == "terminate" and e.ending.was_not_requested,
        Cause.CRASH,
        lambda e: f"SIGTERM, though the job was not cancelled: {e.saved}",
    ),
    Row(
        "an agreed stop by SIGTERM",
        lambda e: e.stop_signal == "terminate",
        Cause.CANCELLED,
        lambda e: f"SIGTERM: {e.saved}",
    ),
    Row(
        "an agreed stop near the time limit",
        lambda e: e.stop_signal == "deadline" or (e.stopped and e.ending.limit_near),
        Cause.TIME_LIMIT,
        lambda e: f"time limit near: {e.saved}",
    ),
    Row(
        "an agreed stop by the warning signal",
        lambda e: e.stopped,
        Cause.PREEMPTION,
        lambda e: f"the warning signal: {e.saved}",
    ),
    Row(
        "the policy allowed no start",
        lambda e: e.own.newest(AttemptRefused),
        Cause.EXHAUSTED,
        lambda e: e.reason(AttemptRefused, "refused"),
    ),
    Row(
        "rank 0 refused the input",
        lambda e: e.own.newest(BadInput) and not e.of_node,
        Cause.BAD_INPUT,
        lambda e: e.reason(BadInput, "bad input; the log says what"),
    ),
    Row(
        "Slurm ended the job before it could save",
        lambda e: e.word in _BY_SCHEDULER,
        _by_scheduler,
        lambda e: (
            f"{e.ending.why or e.word}, "
            + (
                f"after the checkpoint of step {saved.step}"
                if (saved := e.own.newest(Saved))
                else "before this attempt wrote a checkpoint"
            )
        ),
    ),
    Row(
        "the batch step has lost a node and ended the ranks on the others",
        lambda e: e.own.newest(NodeLost),
        Cause.NODE_FAILURE,
        lambda e: f"{host_of(e)} was lost: {e.reason(NodeLost, 'it does not answer')}",
    ),
    Row(
        "Slurm has ended the rank of a node that came back after its loss",
        lambda e: e.late_kill,
        Cause.NODE_FAILURE,
        lambda e: f"{_crash_line(e)}: Slurm ended late what the node had run before its loss",
    ),
    Row(
        "an error that other nodes may not have",
        _is_of_node,
        Cause.CRASH,
        _of_node_line,
    ),
    Row(
        # The ranks have not run, so this end does not use their budget for crashes.
        "a preflight found nodes unfit",
        lambda e: e.diagnosis is not None and e.diagnosis.unfit,
        Cause.NODE_FAILURE,
        lambda e: e.diagnosis.line if e.diagnosis else "",
    ),
    Row(
        "the input is bad",
        _bad_input,
        Cause.BAD_INPUT,
        _bad_input_line,
    ),
    Row(
        "no progress after a suspension",
        lambda e: e.ending.just_resumed and e.diagnosis is not None and e.diagnosis.waited,
        Cause.PREEMPTION,
        lambda e: f"the job was suspended: {_crash_line(e)}",
    ),
    Row(
        "a hang",
        lambda e: e.diagnosis is not None and e.diagnosis.hang,
        Cause.HANG,
        lambda e: e.diagnosis.line if e.diagnosis else "",
    ),
    Row(
        "a crash that left a trace",
        lambda e: e.diagnosis is not None,
        Cause.CRASH,
        _crash_line,
    ),
    Row(
        "an exit code and nothing else",
        lambda _: True,
        Cause.CRASH,
        lambda e: f"exit code {e.exit_code}; no rank recorded an error",
    ),
)
