"""Compare the disturbed run with the undisturbed run: bytes, samples, event log, goodput."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json, read_lines
from hpcrun.run.goodput import Goodput, goodput
from hpcrun.run.journal.events import Event
from hpcrun.run.journal.journal import Journal
from tests.support import jobs

from .disturbed import NODES, Chaos


def verify(chaos: Chaos, reference: RunDirectory) -> dict[str, str]:
    """Compare the disturbed run with the undisturbed run; raises AssertionError on a difference."""
    result = read_json(chaos.run.result) or {}
    assert result.get("state") == "finished", f"{result}\n{chaos.story()}"
    assert jobs.final_state(chaos.run) == jobs.final_state(reference), "the final states differ"
    for rank in range(NODES * chaos.ranks):
        calm = jobs.samples_by_step(reference, chaos.folder, rank, accumulation=2)
        rough = jobs.samples_by_step(chaos.run, chaos.folder, rank, accumulation=2)
        assert sorted(calm) == list(range(chaos.steps))
        assert rough == calm, f"rank {rank} saw other samples"
    state = Journal(chaos.run).read()
    events = state.events
    opened = [event.attempt for event in events if event.tag == "opened"]
    ended = [event.attempt for event in events if event.tag == "ended"]
    assert len(set(opened)) == len(opened), "an attempt was opened twice"
    endless = sorted(str(one) for one in set(opened) - set(ended))
    # A job that is cancelled during a start may be killed before its end is recorded.
    cancelled = {event.attempt for event in events if event.tag == "cancelled"}
    assert set(opened) - set(ended) <= cancelled, f"without an end: {endless}\n{chaos.story()}"
    assert len(set(ended)) == len(ended), f"an attempt has two ends\n{chaos.story()}"
    steps = read_lines(chaos.run.metrics)
    _check_one_writer(events, steps)
    account = goodput(state, time.time())
    logged = [float(line["time"]) for line in steps if "loss" in line]
    _check_account(account, result, events, logged)
    return {
        "attempts": str(len(opened)),
        "restarts in place": str(sum(one is not None and one.in_place > 0 for one in opened)),
        "other restarts": str(sum(one is not None and not one.in_place for one in opened) - 1),
        "steps computed": f"{len(logged)} for {chaos.steps}",
        "wall": f"{account.wall:.0f} s",
        "productive (ETTR)": f"{100 * (account.ettr or 0):.0f} %",
        **{part: f"{value:.0f} s" for part, value in vars(account).items() if part != "known"},
    }


def _check_one_writer(events: Sequence[Event], lines: Sequence[dict[str, Any]]) -> None:
    """Check that no attempt wrote anything after a newer attempt had opened the run.

    ``lines`` are the lines of metrics.jsonl.
    """
    owner = None
    order: list[tuple[object, object]] = []
    for event in events:
        if event.tag == "opened":
            owner = event.attempt
            assert owner is not None
            order.append((owner.restart, owner.in_place))
        elif event.tag in ("started", "saved", "trained", "stopped", "finished"):
            late = event.tag == "saved" and event.found
            assert event.attempt == owner or late, f"{event} came after {owner} had opened the run"
    at = 0
    for line in lines:
        writer = line.get("restart", 0), line.get("in_place", 0)
        while at < len(order) and order[at] != writer:
            at += 1
        assert at < len(order), f"step {line['step']} of {writer} follows lines of newer attempts"


def _check_account(
    account: Goodput, result: dict[str, object], events: Sequence[Event], steps: list[float]
) -> None:
    """Check that the parts of the goodput add up to the wall time, and cover the time of logged steps.

    ``steps`` are the Unix times of the logged steps.
    """
    wall = events[-1].time - events[0].time
    assert abs(account.wall - wall) < 1.0, f"{account} does not add up to {wall}"
    assert result["goodput"] == account.as_record(), "result.json has another account"
    begun: dict[Attempt, float] = {}
    for event in events:
        if event.tag == "started" and event.attempt is not None:
            begun[event.attempt] = event.time
    seen = 0.0
    borders = [*sorted(begun.values()), float("inf")]
    for start, following in itertools.pairwise(borders):
        seen += max([time - start for time in steps if start <= time < following], default=0.0)
    computing = account.productive + account.checkpoint + account.recomputed
    assert computing > 0.95 * seen, f"steps were computed for {seen:.0f} s: {account}"
