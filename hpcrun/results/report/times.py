"""Figures of time for the page: the timeline of each run, and the shares of goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.job.history import spans
from hpcrun.results.report.drawing import (
    BLUE,
    GRAY,
    GREEN,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    label,
    sampled,
    several,
)
from hpcrun.results.report.runs import ReportedRun
from hpcrun.run.events import Cause, Event

MOST_ROWS = 40
"""Runs in timelines and goodput; all runs are in the tables."""
QUEUED, STARTING, RUNNING, LOST, WAITING = "queued", "starting", "running", "lost", "requeue wait"
SAVED, PREEMPTED, FAILED, FINISHED, STOPPED = "saved", "preempted", "failed", "finished", "stopped"
_OF_PREEMPTION = (Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.CONTINUED)
_MOST_SAVES = 100
_SPANS = {
    QUEUED: (PALE, "queued"),
    STARTING: (SKY, "starting or ending"),
    RUNNING: (BLUE, "running"),
    LOST: (VERMILION, "lost, computed again"),
    WAITING: (ORANGE, "waiting for the requeue"),
}
_OF_PARTS = {
    "queue": QUEUED,
    "start_up": STARTING,
    "productive": RUNNING,
    "checkpoint": RUNNING,
    "recomputed": LOST,
    "requeue_wait": WAITING,
}
_MARKS = {
    SAVED: ("line-ns-open", GRAY, "saved"),
    PREEMPTED: ("triangle-down", ORANGE, "preempted or at the time limit"),
    FAILED: ("x", VERMILION, "failed"),
    STOPPED: ("square", GRAY, "cancelled or stopped"),
    FINISHED: ("circle", GREEN, "finished"),
}
PARTS = {
    "productive": (BLUE, "productive"),
    "checkpoint": (GREEN, "writing checkpoints"),
    "recomputed": (VERMILION, "lost, computed again"),
    "start_up": (SKY, "starting or ending"),
    "queue": (PALE, "queued"),
    "requeue_wait": (ORANGE, "waiting for the requeue"),
    "suspended": (PURPLE, "suspended"),
    "idle": (GRAY, "ended, not wanted"),
}
_UNITS = ((86400.0 * 3, 86400.0, "days"), (7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"))


@dataclass(frozen=True)
class Timeline:
    """The history of a run.

    Args:
        spans: state, start and end, in Unix seconds.
        marks: kind, Unix seconds, and the cause of an end.
    """

    spans: list[tuple[str, float, float]]
    marks: list[tuple[str, float, str]]


def timeline(events: Sequence[Event], until: float | None) -> Timeline:
    """Return the history up to ``until``, the last sign of life, with the spans of goodput."""
    found = Timeline([], [])
    for part, start, end in spans(events, until or 0.0):
        # Suspended time is part of the span before it.
        kind = found.spans[-1][0] if part == "suspended" and found.spans else _OF_PARTS.get(part)
        if kind is None:
            continue
        # A save does not interrupt: ten thousand saves would be ten thousand spans.
        if found.spans and found.spans[-1][0] == kind and found.spans[-1][2] == start:
            start = found.spans.pop()[1]
        found.spans.append((kind, start, end))
    attempt, waiting = None, False
    for event in events:
        if event.what == "submitted":
            waiting = waiting or attempt is None
        elif event.what == "opened":
            attempt, waiting = event.attempt, False
        elif event.what == "cancelled" and waiting:
            found.marks.append((STOPPED, event.time, "cancelled"))
            waiting = False
        elif attempt is None or event.attempt != attempt:
            continue
        elif event.what == "saved":
            found.marks.append((SAVED, event.time, ""))
        elif event.what == "ended":
            seen = float(event.fields.get("last_seen") or event.time)
            waiting = bool(event.fields.get("restart_allowed"))
            mark = _mark_of(event.cause, again=waiting)
            found.marks.append((mark, seen, event.cause or "unknown"))
    return found


def _mark_of(cause: str | None, *, again: bool) -> str:
    if cause == FINISHED:
        return FINISHED
    if cause in _OF_PREEMPTION:
        return PREEMPTED if again else STOPPED
    return STOPPED if cause == Cause.CANCELLED else FAILED


def chosen_rows(runs: Sequence[ReportedRun]) -> Sequence[ReportedRun]:
    """Return at most :data:`MOST_ROWS` runs: even samples of the finished runs and of the other runs."""
    bad = [run for run in runs if run.state != FINISHED]
    good = [run for run in runs if run.state == FINISHED]
    bad = sampled(bad, max(MOST_ROWS // 2, MOST_ROWS - len(good)))
    chosen = {run.key for run in (*bad, *sampled(good, MOST_ROWS - len(bad)))}
    return [run for run in runs if run.key in chosen]


def timeline_figure(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    """Return the spans, saves and ends of each run for plotly; None without events."""
    found = [(run, timeline(run.events, run.ended or run.seen)) for run in runs if run.events]
    found = [(run, one) for run, one in found if one.spans or one.marks]
    if not found:
        return None
    starts = [min([span[1] for span in one.spans] + [m[1] for m in one.marks]) for _, one in found]
    lasts = [max([span[2] for span in one.spans] + [m[1] for m in one.marks]) for _, one in found]
    longest = max(last - start for start, last in zip(starts, lasts, strict=True)) or 1.0
    scale, unit = _unit(longest)
    bars = {kind: _trace(words, color) for kind, (color, words) in _SPANS.items()}
    marks = {kind: _trace(words, color, shape) for kind, (shape, color, words) in _MARKS.items()}
    for (run, one), zero in zip(found, starts, strict=True):
        name = label(run.label, 34)
        for kind, start, end in one.spans:
            words = f"{_SPANS[kind][1]}, {duration(end - start)}"
            _add(bars[kind], name, (end - start) / scale, words, base=(start - zero) / scale)
        saves = [mark for mark in one.marks if mark[0] == SAVED]
        others = [mark for mark in one.marks if mark[0] != SAVED]
        for kind, at, cause in [*sampled(saves, _MOST_SAVES), *others]:
            words = cause or f"one of {several(len(saves), 'save')}"
            _add(marks[kind], name, (at - zero) / scale, words)
    traces = [one for one in (*bars.values(), *marks.values()) if one["x"]]
    return {
        "data": traces,
        "x": f"{unit} since the first submission of each run",
        "rows": len(found),
    }


def goodput_figure(runs: Sequence[ReportedRun]) -> dict[str, Any] | None:
    """Return the parts of each run's time for plotly; None without events."""
    timed = [run for run in runs if run.events and run.goodput.wall > 0]
    if not timed:
        return None
    bars = {part: _trace(words, color) for part, (color, words) in PARTS.items()}
    for run in timed:
        for part, bar in bars.items():
            seconds = vars(run.goodput)[part]
            share = 100 * seconds / run.goodput.wall
            if share > 0:
                words = f"{PARTS[part][1]}, {duration(seconds)} ({share:.1f}%)"
                _add(bar, label(run.label, 34), share, words)
    traces = [one for one in bars.values() if one["x"]]
    return {"data": traces, "x": "share of the run's time (%)", "rows": len(timed)}


def _trace(words: str, color: str, shape: str | None = None) -> dict[str, Any]:
    """Return an empty trace of plotly: bars, or marks of a ``shape``."""
    if shape is None:
        return {
            "type": "bar",
            "orientation": "h",
            "name": words,
            "marker": {"color": color},
            "x": [],
        }
    marker = {"symbol": shape, "color": color, "size": 9, "line": {"color": INK, "width": 1}}
    return {"type": "scatter", "mode": "markers", "name": words, "marker": marker, "x": []}


def _add(bars: dict[str, Any], name: str, x: float, words: str, **more: float) -> None:
    for key, value in {"x": round(x, 5), "y": name, "hovertext": words, **more}.items():
        bars.setdefault(key, []).append(value)


def _unit(span: float) -> tuple[float, str]:
    return next(((scale, word) for least, scale, word in _UNITS if span >= least), (1.0, "seconds"))


def duration(seconds: float) -> str:
    """Return seconds in words, such as 20.3 minutes."""
    scale, unit = _unit(seconds)
    return f"{seconds / scale:.3g} {unit}"
