"""The follow-up job if no requeue is allowed, with substitutes for Slurm's programs."""

from pathlib import Path

import pytest

from hpcrun.job.restart.requeue import ContinuationError, submit_successor
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from tests.support.journal import read_events, record_event

from .slurm_substitutes import FIRST, Desk, Hours

AWAY = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
LIMIT = (
    "sbatch: error: QOSMaxSubmitJobPerUserLimit\n"
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
)


@pytest.fixture
def desk(desk: Desk) -> Desk:
    desk.answer("squeue", "")
    return desk


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create(tmp_path / "a run", "x", {})
    run.batch_script.parent.mkdir(exist_ok=True)
    run.batch_script.write_text("#!/bin/bash\n")
    record_event(run, "submitted", attempt=FIRST, executor="slurm", nodes=1)
    return run


def refuse(desk: Desk, words: str, times: int) -> None:
    """Let sbatch fail this often, and then accept job 8."""
    count = desk.folder / "count"
    desk.answer(
        "sbatch",
        f"echo x >> {count}; [ $(wc -l < {count}) -gt {times} ] && echo 8 && exit 0\n"
        f"printf '{words}\\n' >&2; exit 1",
    )


def called(desk: Desk, program: str) -> int:
    return sum(call.split()[0] == program for call in desk.calls.read_text().splitlines())


@pytest.mark.parametrize(("words", "kind"), [(AWAY, "transient"), (LIMIT, "unknown")])
def test_an_sbatch_that_fails_for_a_moment_is_tried_again(
    desk: Desk, run: RunDirectory, words: str, kind: str
) -> None:
    refuse(desk, words, times=3)
    clock, told = Hours(desk), list[str]()
    failed = lambda kind, _: told.append(kind)  # noqa: E731
    assert submit_successor(run, FIRST, failed, until=3600.0, clock=clock) == "8"
    assert clock.waits == [5.0, 10.0, 20.0]
    assert told == [kind] * (1 if kind == "transient" else 3)
    newest = read_events(run)[-1]
    assert (newest.tag, newest.attempt) == ("submitted", Attempt("8", 0))
    assert newest.continues == "7"
    # Other runs may have shared the job before, and do not share this one.


def test_a_refusal_that_stays_is_given_up(desk: Desk, run: RunDirectory) -> None:
    refuse(desk, LIMIT, times=99)
    clock = Hours(desk)
    with pytest.raises(ContinuationError, match="QOSMaxSubmitJobPerUserLimit"):
        submit_successor(run, FIRST, lambda *_: None, until=1e9, clock=clock)
    assert called(desk, "sbatch") == 5
    assert len(read_events(run)) == 1


def test_a_controller_away_until_the_limit_is_given_up(desk: Desk, run: RunDirectory) -> None:
    refuse(desk, AWAY, times=999)
    clock = Hours(desk)
    with pytest.raises(ContinuationError, match="Unable to contact"):
        submit_successor(run, FIRST, lambda *_: None, until=600.0, clock=clock)
    assert 600 <= clock.time <= 630
