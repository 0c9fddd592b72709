"""A canceled job never comes back, at any moment of the cancellation.

The moments are random over the whole course of a job: waiting, set-up, start of the ranks,
training, saving, classification, requeue. Each run is preempted once, so that the last three occur.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import pytest

from hpcrun.run.directory import RunDirectory
from tests.support import jobs

from .cluster import FINAL_STATES
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle, pytest.mark.slow]

COUNT = int(os.environ.get("HPCRUN_CANCELLATIONS", "50"))
SEED = int(os.environ.get("HPCRUN_CANCELLATIONS_SEED", "1"))
# Four runs at a time share the four nodes. The seconds cover a start on a busy machine and a requeue.
AT_ONCE = 4
LONGEST_S = 40.0
# A job that was requeued by mistake starts again well within this time.
COMES_BACK_S = 30.0


@dataclass
class Victim:
    """A run, and the moments (seconds after its submission) of each action on the run."""

    run: RunDirectory
    submitted: float
    preempt_after: float
    cancel_after: float
    by: str
    preempted: bool = False
    cancelled: bool = False


def test_no_canceled_job_comes_back(bench: Bench) -> None:
    dice = random.Random(SEED)
    cancelled: list[Victim] = []
    for first in range(0, COUNT, AT_ONCE):
        cancelled += _cancel_some(bench, dice, range(first, min(first + AT_ONCE, COUNT)))
    time.sleep(COMES_BACK_S)
    left = bench.slurm.admin("squeue", "--noheader").strip()
    assert not left, left
    for victim in cancelled:
        story = f"{victim}\n{bench.story(victim.run)}"
        last = jobs.events(victim.run, "opened")[-1:]
        # An earlier attempt may have had any end: on a busy machine Slurm may set a healthy node to down.
        causes = [
            event.cause
            for event in jobs.events(victim.run, "ended")
            if [event.attempt] == [opened.attempt for opened in last]
        ]
        assert set(causes) <= {"cancelled", "finished", "preemption"}, story


def _cancel_some(bench: Bench, dice: random.Random, numbers: range) -> list[Victim]:
    victims = []
    for number in numbers:
        run = bench.submit(
            f"victim-{number}",
            model__pause=0.05,
            checkpoint__every=5,
            **{"train.steps": 2000, "job.setup": ["sleep 1"]},
        )
        moment = dice.uniform(0.0, LONGEST_S)
        preempt_after = max(0.0, moment - dice.choice([0.2, 1.0, 2.0, 4.0, 10.0]))
        by = dice.choice(["scancel", "hpcrun"])
        victims.append(Victim(run, time.monotonic(), preempt_after, moment, by))
    while not all(victim.cancelled for victim in victims):
        for victim in victims:
            _act(bench, victim)
        time.sleep(0.05)
    for victim in victims:
        # Slurm forgets a job some minutes after its end.
        bench.slurm.wait_state(bench.job(victim.run), FINAL_STATES)
    return victims


def _act(bench: Bench, victim: Victim) -> None:
    age = time.monotonic() - victim.submitted
    if not victim.preempted and age >= victim.preempt_after:
        victim.preempted = True
        # A job that does not run yet cannot be preempted: the command then says so.
        bench.hpcrun("preempt", victim.run.name, check=False)
    if victim.cancelled or age < victim.cancel_after:
        return
    victim.cancelled = True
    if victim.by == "scancel":
        bench.slurm.run(["scancel", bench.job(victim.run)], check=False)
    else:
        bench.hpcrun("cancel", "--no-wait", victim.run.name, check=False)
