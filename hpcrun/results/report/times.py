"""Figures of time: the timeline of each run, and the shares of goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hpcrun.job.history import spans
from hpcrun.results.report.figures import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    OTHERS,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    Drawing,
    label,
    sampled,
    style,
)
from hpcrun.results.report.runs import ReportedRun
from hpcrun.run.events import Cause, Event

MOST_ROWS = 40
"""Runs in timelines and goodput; all runs are in the tables."""
QUEUED, STARTING, RUNNING, LOST, WAITING = "queued", "starting", "running", "lost", "requeue wait"
SAVED, PREEMPTED, FAILED, FINISHED, STOPPED = "saved", "preempted", "failed", "finished", "stopped"
_OF_PREEMPTION = (Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.CONTINUED)
_MOST_SAVES = 400
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
    PREEMPTED: ("v", ORANGE, "preempted or at the time limit"),
    FAILED: ("X", VERMILION, "failed"),
    STOPPED: ("s", OTHERS, "cancelled or stopped"),
    FINISHED: ("o", GREEN, "finished"),
}
PARTS = {
    "productive": (BLUE, "productive"),
    "checkpoint": (GREEN, "writing checkpoints"),
    "recomputed": (VERMILION, "lost, computed again"),
    "start_up": (SKY, "starting or ending"),
    "queue": (PALE, "queued"),
    "requeue_wait": (ORANGE, "waiting for the requeue"),
    "suspended": (PURPLE, "suspended"),
    "idle": (OTHERS, "ended, not wanted"),
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


def timeline_figure(runs: Sequence[ReportedRun]) -> Drawing | None:
    """Return the spans, saves and ends of each run; None without events."""
    found = [(run, timeline(run.events, run.ended or run.seen)) for run in runs if run.events]
    found = [(run, one) for run, one in found if one.spans or one.marks]
    if not found:
        return None
    starts = [min([span[1] for span in one.spans] + [m[1] for m in one.marks]) for _, one in found]
    lasts = [max([span[2] for span in one.spans] + [m[1] for m in one.marks]) for _, one in found]
    longest = max(last - start for start, last in zip(starts, lasts, strict=True)) or 1.0
    scale, unit = _unit(longest)
    titles: dict[str, str] = {}
    with style():
        figure, axes = _bars([run.key for run, _ in found])
        for at, ((run, one), zero) in enumerate(zip(found, starts, strict=True)):
            for place, (kind, start, end) in enumerate(one.spans):
                gid, (color, words) = f"run{at}-span{place}", _SPANS[kind]
                left, width = (start - zero) / scale, (end - start) / scale
                axes.barh(at, width, left=left, height=0.62, color=color, lw=0)[0].set_gid(gid)
                titles[gid] = f"{run.key}: {words}, {_duration(end - start)}"
            _draw_marks(
                axes, at, run.key, [(k, (t - zero) / scale, c) for k, t, c in one.marks], titles
            )
        axes.set_xlim(0, longest / scale * 1.02)
        axes.set_xlabel(f"{unit} since the first submission of each run")
        _legend(figure, list(_SPANS.values()), list(_MARKS.values()))
    caption = (
        "Spans and ends of each run, from its event log; each begins at zero. Thin lines: saves. Suspended "
        "time is part of its span."
    )
    return Drawing("timeline", "Timeline of each run", caption, figure, titles, wide=True)


def _draw_marks(
    axes: Any, at: int, key: str, marks: Sequence[tuple[str, float, str]], titles: dict[str, str]
) -> None:
    saves = [x for kind, x, _ in marks if kind == SAVED]
    if saves:
        # More lines than pixels would not be visible.
        shown = sampled(saves, _MOST_SAVES)
        axes.vlines(shown, at - 0.31, at + 0.31, color=INK, lw=0.7, gid=f"run{at}-saves")
        titles[f"run{at}-saves"] = f"{key}: {len(saves):,} save{'s' * (len(saves) > 1)}"
    for place, (kind, x, cause) in enumerate(marks):
        if kind != SAVED:
            shape, color, _ = _MARKS[kind]
            gid, edge = f"run{at}-mark{place}", {"mec": INK, "mew": 0.5, "clip_on": False}
            axes.plot([x], [at], shape, color=color, ms=5.5, zorder=4, gid=gid, **edge)
            titles[gid] = f"{key}: {cause}"


def goodput_figure(runs: Sequence[ReportedRun]) -> Drawing | None:
    """Return the parts of each run's time; None without events."""
    timed = [run for run in runs if run.events and run.goodput.wall > 0]
    if not timed:
        return None
    titles: dict[str, str] = {}
    with style():
        figure, axes = _bars([run.key for run in timed])
        draw_goodput(axes, timed, titles)
        _legend(figure, list(PARTS.values()), [])
    caption = (
        "Shares of each run's time since its first submission. At the right: effective training time ratio "
        "(ETTR), the productive share of all time except idle."
    )
    return Drawing("goodput", "Goodput of each run", caption, figure, titles, wide=True)


def draw_goodput(axes: Any, runs: Sequence[ReportedRun], titles: dict[str, str]) -> None:
    """Draw a bar for each run, with the shares of its time in percent."""
    for at, run in enumerate(runs):
        left = 0.0
        for part, (color, words) in PARTS.items():
            seconds = vars(run.goodput)[part]
            share = 100 * seconds / run.goodput.wall
            if share > 0:
                gid = f"run{at}-{part}"
                axes.barh(at, share, left=left, height=0.72, color=color, lw=0)[0].set_gid(gid)
                titles[gid] = f"{run.key}: {words}, {_duration(seconds)} ({share:.1f}%)"
            left += share
        if (ettr := run.goodput.ettr) is not None:
            axes.text(101, at, f"{ettr:.0%}", va="center", fontsize=7)
    name_rows(axes, [run.key for run in runs])
    axes.set_xlim(0, 100)
    axes.set_xlabel("goodput: share of the run's time (%)")


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """Name the rows of a bar chart, the first one on top."""
    axes.set_yticks(range(len(names)), [label(name, 34) for name in names], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(len(names), 3) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _bars(names: Sequence[str]) -> tuple[Figure, Any]:
    height = 1.15 + 0.17 * max(len(names), 3)
    figure = Figure(figsize=(9.4, height), layout="constrained")
    axes = figure.subplots()
    name_rows(axes, names)
    return figure, axes


def _legend(
    figure: Figure, parts: Sequence[tuple[str, str]], marks: Sequence[tuple[str, str, str]]
) -> None:
    handles: list[Any] = [Patch(color=color, label=words, lw=0) for color, words in parts]
    handles += [
        Line2D([], [], marker=shape, color=color, ls="", ms=6, mec=INK, mew=0.5, label=words)
        for shape, color, words in marks
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=5, columnspacing=1.2)


def _unit(span: float) -> tuple[float, str]:
    return next(((scale, word) for least, scale, word in _UNITS if span >= least), (1.0, "seconds"))


def _duration(seconds: float) -> str:
    scale, unit = _unit(seconds)
    return f"{seconds / scale:.3g} {unit}"
