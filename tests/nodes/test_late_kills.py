"""A start of a job after the loss of a node: new step numbers, and one late end that is no crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.diagnose.causes import Diagnosis
from hpcrun.nodes.late_kills import ended_late, numbers_to_skip, skip_numbers
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import create
from hpcrun.run.journal.events import Event
from hpcrun.run.journal.state import State
from tests.support.journal import event, record_event

NOW, AGAIN = 10_000.0, Attempt("7", 2)


def told(
    what: str, start: int = 1, *, cause: str | None = None, ago: float = 60, **fields
) -> Event:
    attempt = Attempt(fields.pop("job", "7"), start, fields.pop("in_place", 0))
    return event(what, attempt, time=NOW - ago, cause=cause, **fields)


def opened(step: int | None, start: int = 1, **fields) -> Event:
    return told("opened", start, **({} if step is None else {"slurm_step": step}), **fields)


def ended(cause: str, start: int = 1, **fields) -> Event:
    return told("ended", start, cause=cause, **fields)


PLANNED = [opened(0, 0), ended("preemption", 0), opened(0), ended("time-limit")]


@pytest.mark.parametrize(
    ("events", "count"),
    [
        # The batch host took the record of the end with it.
        ([*PLANNED[:3]], 2),
        ([opened(0), ended("node-failure")], 2),
        ([opened(0), opened(2, in_place=1), ended("crash", in_place=1)], 4),
        # No rank opened the second start.
        ([opened(3, 0), ended("node-failure", 0)], 7),
        ([told("submitted", 0)], 4),
        ([opened(None), ended("hang")], 2),
        # A node was lost, and others trained on until a planned end.
        ([opened(1), told("node-lost"), *PLANNED[3:]], 3),
        ([opened(0), told("spare-lost"), *PLANNED[3:]], 2),
        (PLANNED, 0),
        ([], 0),
        ([opened(0, job="6"), ended("node-failure", job="6")], 0),
        ([opened(0, ago=4000), ended("node-failure", ago=4000)], 0),
        ([opened(0, 2)], 0),
    ],
)
def test_numbers_of_steps_on_lost_nodes_are_skipped(events: list[Event], count: int) -> None:
    assert numbers_to_skip(State(events), AGAIN, NOW) == count


@pytest.mark.parametrize(
    ("restart", "code", "calls"), [(1, 0, 4), (1, 1, 1), (0, 0, 0)], ids=["all", "refused", "first"]
)
def test_each_skipped_number_is_an_empty_step_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: int, code: int, calls: int
) -> None:
    run = create(tmp_path / "run", "", {})
    record_event(run, "opened", attempt=Attempt("7", 0), slurm_step=2)
    noted = tmp_path / "calls"
    noted.touch()
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/bash\necho "$SLURM_NTASKS_PER_NODE $*" >> {noted}; exit {code}\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURMD_NODENAME", "n3")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    skip_numbers(run, Attempt("7", restart))
    made = noted.read_text().splitlines()
    assert len(made) == calls
    assert all(line.startswith(" ") and " --nodelist=n3 " in line for line in made)


LOST = told("node-lost", 0, host="n3")


@pytest.mark.parametrize(
    ("events", "line", "host", "late"),
    [
        ([LOST], "rank 2 on n3 was killed by SIGKILL", "n3", True),
        ([told("spare-lost", host="n3")], "n3: task 2: Killed", "n3", True),
        ([LOST, ended("crash", 2)], "rank 2 on n3 was killed by SIGKILL", "n3", True),
        ([LOST], "rank 1 on n2 was killed by SIGKILL", "n2", False),
        ([LOST], "rank 2 on n3: ValueError: bad", "n3", False),
        ([LOST, ended("node-failure", 2)], "rank 2 on n3 was killed by SIGKILL", "n3", False),
        ([told("node-lost", 2, host="n3")], "rank 2 on n3 was killed by SIGKILL", "n3", False),
        ([told("node-lost", host="n3", ago=900)], "n3: task 2: Killed", "n3", False),
        ([told("node-lost", host="n3", job="6")], "n3: task 2: Killed", "n3", False),
        ([LOST], "task 2: Killed", None, False),
    ],
)
def test_a_late_end_by_slurm_is_no_crash(
    events: list[Event], line: str, host: str | None, late: bool
) -> None:
    assert ended_late(State(events), AGAIN, Diagnosis(line, 2, host), NOW) is late
