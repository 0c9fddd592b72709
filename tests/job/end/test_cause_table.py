"""Each row of the cause table decides if its evidence is present, before all rows below it."""

from dataclasses import replace
from typing import Any

import pytest

from hpcrun.diagnose.causes import Diagnosis
from hpcrun.job.cause_table import TABLE, Evidence, classify, deciding_row, evidence_of
from hpcrun.job.scheduler_view import NO_ENDING, Ending
from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import Cause, Event
from hpcrun.run.journal.state import State
from tests.support.journal import event as made

FIRST = Attempt("7", 0)
CRASH = Diagnosis("rank 1 on n2: ValueError: bad", 1, "n2", 5, None, 2)
HANG = Diagnosis("rank 1 on n2 is behind", 1, "n2", 5, None, 0, hang=True)
WRONG = Diagnosis("rank 1 on n2: no such file", 1, "n2", None, None, 0, bad_input=True)
UNFIT = Diagnosis(
    "preflight on n2: ecc: 5 errors", None, "n2", None, None, 0, node_fault=True, unfit=("n2",)
)
SLOW = Diagnosis("n2 is slow", 1, "n2", 10, None, 0, node_fault=True, unfit=("n2",))
KILLED = Diagnosis("rank 1 on n2 was killed by SIGKILL", 1, "n2", None, None, 1)
NODE = Diagnosis("rank 1 on n2: execve()", 1, "n2", None, None, 0, node_fault=True)


def event(what: str, cause: str | None = None, step: int | None = None, **fields: object) -> Event:
    return made(what, FIRST, time=1.0, cause=cause, step=step, **fields)


OWN = ("diagnosis", "unfinished", "of_node", "late_kill")


def evidence(*events: Event, code: int = 137, **more: Any) -> Evidence:
    own = {name: more.pop(name) for name in OWN if name in more}
    return Evidence(State(events), code, Ending(**more), **own)


def signalled(*events: Event, **more: Any) -> Evidence:
    """Return the evidence of a job that runs on after the line of a cancellation."""
    ending = Ending("cancelled", was_not_requested=True, signalled=True)
    mine = [*events] or [event("opened")]
    return replace(evidence_of(State(mine), FIRST, 1, ending, None), **more)


SCRIPT = event("opened", script=True)
SAVED = {"step": 10, "committed": True}
BY_TERM = event("stopped", "terminate", **SAVED)  # type: ignore[arg-type]
BY_WARNING = event("stopped", "warning", **SAVED)  # type: ignore[arg-type]
BY_DEADLINE = event("stopped", "deadline", **SAVED)  # type: ignore[arg-type]

CASES = {
    "the training has finished": (
        evidence(event("finished"), word="cancelled", diagnosis=CRASH),
        (Cause.FINISHED, "finished"),
    ),
    "a script has asked to be continued": (
        evidence(SCRIPT, code=0, unfinished=True),
        (Cause.CONTINUED, "the script asked to be continued (exit code 75)"),
    ),
    "a script has ended well by itself": (
        evidence(SCRIPT, code=0),
        (Cause.FINISHED, "the script ended with exit code 0 on all ranks"),
    ),
    "a script has finished its work before a signal ended it": (
        evidence(SCRIPT, event("stopped", "warning", done=True, exit_code=0), code=0),
        (
            Cause.FINISHED,
            "the work is finished; then the script ended with exit code 0",
        ),
    ),
    "the last checkpoint is not there": (
        evidence(
            event("save-failed", reason="disk full"),
            event("stopped", "warning", committed=False),
            code=74,
            word="cancelled",
        ),
        (Cause.SAVE_FAILED, "the last checkpoint was not written: disk full"),
    ),
    "an agreed stop, for which Slurm gives a reason": (
        evidence(BY_TERM, word="preemption", was_not_requested=True),
        (Cause.PREEMPTION, "preemption: stopped and saved at step 10"),
    ),
    "an agreed stop to replace a slow node": (
        evidence(event("stopped", "slow-node", **SAVED), diagnosis=SLOW, limit_near=True),  # type: ignore[arg-type]
        (Cause.NODE_FAILURE, "n2 is slow; stopped and saved at step 10"),
    ),
    "an agreed stop by a SIGTERM that was not a cancellation": (
        evidence(BY_TERM, was_not_requested=True),
        (Cause.CRASH, "SIGTERM, though the job was not cancelled: stopped and saved at step 10"),
    ),
    "an agreed stop by SIGTERM": (
        evidence(BY_TERM, diagnosis=CRASH),
        (Cause.CANCELLED, "SIGTERM: stopped and saved at step 10"),
    ),
    "an agreed stop near the time limit": (
        evidence(BY_WARNING, limit_near=True),
        (Cause.TIME_LIMIT, "time limit near: stopped and saved at step 10"),
    ),
    "an agreed stop by the warning signal": (
        evidence(SCRIPT, event("stopped", "warning", committed=False, killed=True)),
        (Cause.PREEMPTION, "the warning signal: the script died of the signal"),
    ),
    "the policy allowed no start": (
        evidence(event("refused", reason="3 hangs, 2 allowed"), code=2),
        (Cause.EXHAUSTED, "3 hangs, 2 allowed"),
    ),
    "rank 0 refused the input": (
        evidence(event("bad-input", reason="task: no such thing"), code=2, word="cancelled"),
        (Cause.BAD_INPUT, "task: no such thing"),
    ),
    "Slurm ended the job before it could save": (
        evidence(code=143, word="cancelled", diagnosis=CRASH),
        (Cause.CANCELLED, "cancelled, before this attempt wrote a checkpoint"),
    ),
    "the batch step has lost a node and ended the ranks on the others": (
        evidence(event("node-lost", host="n2", reason="no heartbeat for 5 s"), code=143),
        (Cause.NODE_FAILURE, "n2 was lost: no heartbeat for 5 s"),
    ),
    "Slurm has ended the rank of a node that came back after its loss": (
        evidence(diagnosis=KILLED, late_kill=True),
        (
            Cause.NODE_FAILURE,
            "rank 1 on n2 was killed by SIGKILL (1 other rank then failed): "
            "Slurm ended late what the node had run before its loss",
        ),
    ),
    "an error that other nodes may not have": (
        evidence(event("bad-input", reason="no such file", host="n1"), code=2, of_node=True),
        (Cause.CRASH, "n1: no such file"),
    ),
    "a preflight found nodes unfit": (
        evidence(code=1, diagnosis=UNFIT),
        (Cause.NODE_FAILURE, "preflight on n2: ecc: 5 errors"),
    ),
    "the input is bad": (
        evidence(code=2, diagnosis=WRONG),
        (Cause.BAD_INPUT, "rank 1 on n2: no such file"),
    ),
    "no progress after a suspension": (
        evidence(diagnosis=HANG, just_resumed=True),
        (Cause.PREEMPTION, "the job was suspended: rank 1 on n2 is behind"),
    ),
    "a hang": (evidence(diagnosis=HANG), (Cause.HANG, "rank 1 on n2 is behind")),
    "a crash that left a trace": (
        evidence(diagnosis=CRASH),
        (Cause.CRASH, "rank 1 on n2: ValueError: bad (2 other ranks then failed)"),
    ),
    "an exit code and nothing else": (
        evidence(code=1),
        (Cause.CRASH, "exit code 1; no rank recorded an error"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_decides_by_its_evidence(name: str) -> None:
    found, classification = CASES[name]
    assert deciding_row(found).name == name
    assert classify(found) == classification


def test_every_row_has_a_case() -> None:
    assert [row.name for row in TABLE] == list(CASES)


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        # The program may have ended well because Slurm asked it to end.
        (evidence(SCRIPT, code=0, word="cancelled"), Cause.CANCELLED),
        (evidence(BY_DEADLINE), Cause.TIME_LIMIT),
        (evidence(code=2), Cause.BAD_INPUT),
        # One node could not start the program: srun's exit code 2 is not the run's.
        (evidence(code=2, diagnosis=NODE), Cause.CRASH),
        # The line of `scancel --batch --signal=TERM`, long before.
        (signalled(diagnosis=CRASH), Cause.CRASH),
        (signalled(BY_TERM, diagnosis=CRASH), Cause.CANCELLED),
        (signalled(diagnosis=replace(CRASH, crash="SIGTERM")), Cause.CANCELLED),
        (signalled(), Cause.CANCELLED),
        # A cancelled set-up has any exit code.
        (evidence(code=2, word="cancelled"), Cause.CANCELLED),
        # A rank's own error is a crash, even after a suspension.
        (evidence(diagnosis=CRASH, just_resumed=True), Cause.CRASH),
        (evidence(diagnosis=replace(CRASH, follows=True), just_resumed=True), Cause.PREEMPTION),
    ],
)
def test_the_order_of_the_rows_counts(found: Evidence, cause: Cause) -> None:
    assert classify(found)[0] is cause


BY_SRUN = event("stopped", "terminate", committed=False, exit_code=-15, killed=True)
BY_OTHERS = replace(CRASH, follows=True)


@pytest.mark.parametrize(
    ("found", "classification"),
    [
        # If a rank of a script fails, srun sends the other ranks a stop signal.
        (
            evidence(SCRIPT, BY_SRUN, was_not_requested=True, diagnosis=CRASH),
            classify(evidence(diagnosis=CRASH)),
        ),
        (
            evidence(SCRIPT, BY_SRUN, was_not_requested=True, diagnosis=WRONG, code=137),
            classify(evidence(diagnosis=WRONG)),
        ),
        (
            evidence(SCRIPT, BY_SRUN, was_not_requested=True),
            (
                Cause.CRASH,
                "SIGTERM, though the job was not cancelled: the script died of the signal",
            ),
        ),
        # Peers of a rank that stopped fail because of it.
        (
            evidence(SCRIPT, BY_SRUN, was_not_requested=True, diagnosis=BY_OTHERS),
            (
                Cause.CRASH,
                "SIGTERM, though the job was not cancelled: the script died of the signal",
            ),
        ),
        (
            evidence(SCRIPT, BY_SRUN, word="preemption", was_not_requested=True, diagnosis=CRASH),
            (Cause.PREEMPTION, "preemption: the script died of the signal"),
        ),
        # A cancellation: the job does not continue.
        (
            evidence(SCRIPT, BY_SRUN, diagnosis=CRASH),
            (Cause.CANCELLED, "SIGTERM: the script died of the signal"),
        ),
        # SIGTERM is the warning.
        (
            evidence(SCRIPT, BY_SRUN, was_not_requested=True, limit_near=True, warned_by_term=True),
            (Cause.TIME_LIMIT, "time limit near: the script died of the signal"),
        ),
        (
            evidence(
                SCRIPT, BY_SRUN, was_not_requested=True, limit_near=False, warned_by_term=True
            ),
            (
                Cause.CRASH,
                "SIGTERM, though the job was not cancelled: the script died of the signal",
            ),
        ),
    ],
)
def test_a_scripts_stop_differs_from_an_end_by_srun(
    found: Evidence, classification: tuple[Cause, str]
) -> None:
    assert classify(found) == classification


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"exit_code": -15, "killed": True}, "the script died of the signal"),
        ({"exit_code": 0}, "the script ended with exit code 0"),
        ({"exit_code": 1}, "the script ended with exit code 1"),
        ({"exit_code": -6}, "the script was killed by SIGABRT"),
        ({"exit_code": 75}, "the script stopped with exit code 75, to be continued"),
        ({"exit_code": 0, "step": 40}, "the script saved step 40"),
        ({"exit_code": None, "killed": True}, "the script had not started"),
    ],
)
def test_only_a_save_that_was_seen_is_called_one(fields: dict[str, object], words: str) -> None:
    stop = event("stopped", "warning", **fields)  # type: ignore[arg-type]
    assert classify(evidence(SCRIPT, stop, limit_near=True)) == (
        Cause.TIME_LIMIT,
        f"time limit near: {words}",
    )


def test_a_script_that_a_person_preempts_by_sigterm_is_preempted() -> None:
    events = [SCRIPT, event("preempted"), BY_SRUN]
    found = evidence_of(State(events), FIRST, 0, Ending(was_not_requested=True), None)
    assert classify(found) == (Cause.PREEMPTION, "preemption: the script died of the signal")
    # The crash was before the signal.
    crashed = evidence_of(State([SCRIPT, event("preempted")]), FIRST, 1, NO_ENDING, CRASH)
    assert classify(crashed)[0] is Cause.CRASH


def test_a_killed_attempt_names_its_newest_checkpoint() -> None:
    found = evidence(event("saved", step=200), code=143, word="cancelled", diagnosis=CRASH)
    assert classify(found) == (Cause.CANCELLED, "cancelled, after the checkpoint of step 200")


def test_a_person_who_cancels_is_believed_before_slurm() -> None:
    events = [event("opened"), event("cancelled")]
    assert evidence_of(State(events), FIRST, 137, Ending("preemption"), None).word == "cancelled"
    assert (
        evidence_of(State(events[:1]), FIRST, 137, Ending("preemption"), None).word == "preemption"
    )
