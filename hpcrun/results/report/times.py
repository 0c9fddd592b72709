"""Figures of time: the timeline of each run, and the shares of goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcrun.results.report.canvas import (
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
    style,
)
from hpcrun.results.report.runs import ReportedRun
from hpcrun.results.report.sweep import several
from hpcrun.run.events import Attempt, Cause, Event

QUEUED, STARTING, RUNNING, LOST, WAITING = "queued", "starting", "running", "lost", "requeue wait"
SAVED, PREEMPTED, FAILED, FINISHED, STOPPED = "saved", "preempted", "failed", "finished", "stopped"
_OF_PREEMPTION = (Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.CONTINUED)


@dataclass(frozen=True)
class Span:
    """A state of a run from ``start`` to ``end``, in Unix seconds."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Mark:
    """A moment in the history of a run, in Unix seconds; ``cause``: of an end."""

    kind: str
    time: float
    cause: str = ""


@dataclass(frozen=True)
class Timeline:
    """The history of a run."""

    spans: Sequence[Span]
    marks: Sequence[Mark]

    @property
    def start(self) -> float | None:
        """The first moment, in Unix seconds; None for an empty history."""
        times = [span.start for span in self.spans] + [mark.time for mark in self.marks]
        return min(times, default=None)

    @property
    def end(self) -> float | None:
        """The last moment, in Unix seconds; None for an empty history."""
        times = [span.end for span in self.spans] + [mark.time for mark in self.marks]
        return max(times, default=None)


def timeline(events: Sequence[Event], until: float | None) -> Timeline:
    """Return the history up to ``until``, the last sign of life.

    ``lost`` is the time after the last save of an attempt that ended without stopping at a step:
    the next attempt computes these steps again. The work of a script is never lost, because its
    saves are unknown.
    """
    walk = _Walk()
    for event in events:
        walk.on(event)
    if until is not None:
        walk.go(until, walk.state)
    return Timeline(tuple(walk.spans), tuple(walk.marks))


class _Walk:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.state: str | None = None
        self._at: float | None = None
        self._attempt: Attempt | None = None
        self._script = False

    def go(self, until: float, state: str | None) -> None:
        """Close the span that began at the last event."""
        if self._at is not None and state is not None and until > self._at:
            start = self._at
            # A save does not interrupt: ten thousand saves would be ten thousand spans.
            if self.spans and self.spans[-1].kind == state and self.spans[-1].end == start:
                start = self.spans.pop().start
            self.spans.append(Span(state, start, until))
        self._at = until if self._at is None else max(self._at, until)

    def on(self, event: Event) -> None:
        if event.what == "submitted":
            if self.state in (None, QUEUED):
                self.go(event.time, self.state)
                self.state = QUEUED
        elif event.what == "opened":
            if self.state == RUNNING:
                self._lose(event.time)
            self.go(event.time, self.state)
            self.state, self._attempt = STARTING, event.attempt
            self._script = bool(event.fields.get("script"))
        elif event.what == "cancelled" and self.state in (QUEUED, WAITING):
            self.go(event.time, self.state)
            self.state = None
            self.marks.append(Mark(STOPPED, event.time, "cancelled"))
        elif event.attempt == self._attempt and event.attempt is not None:
            self._in_attempt(event)

    def _in_attempt(self, event: Event) -> None:
        if event.what == "started":
            self.go(event.time, self.state)
            self.state = RUNNING
        elif event.what == "saved":
            self.go(event.time, self.state)
            self.marks.append(Mark(SAVED, event.time))
        elif event.what in ("stopped", "trained", "finished"):
            self.go(event.time, self.state)
            self.state = STARTING if self.state is not None else None
        elif event.what == "ended":
            self._ended(event)

    def _ended(self, event: Event) -> None:
        seen = float(event.fields.get("last_seen") or event.time)
        if self.state == RUNNING and event.cause != FINISHED:
            self._lose(seen)
        else:
            self.go(seen, self.state)
        again = bool(event.fields.get("restart_allowed"))
        self.state = WAITING if again else None
        self.marks.append(Mark(_mark_of(event.cause, again=again), seen, event.cause or "unknown"))

    def _lose(self, until: float) -> None:
        self.go(until, RUNNING if self._script else LOST)


def _mark_of(cause: str | None, *, again: bool) -> str:
    if cause == FINISHED:
        return FINISHED
    if cause in _OF_PREEMPTION:
        return PREEMPTED if again else STOPPED
    return STOPPED if cause == Cause.CANCELLED else FAILED


ROWS = 40
"""Runs of one figure."""
_MOST_SAVES = 400
_ROW, _FRAME = 0.17, 1.15
_ALIGN = 12.0
"""Runs that spread over more than so many times the longest run begin at a common zero."""
_SPANS = {
    QUEUED: (PALE, "queued"),
    STARTING: (SKY, "starting or ending"),
    RUNNING: (BLUE, "running"),
    LOST: (VERMILION, "lost, computed again"),
    WAITING: (ORANGE, "waiting for the requeue"),
}
_MARKS = {
    SAVED: ("|", INK, "saved"),
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


def timeline_figures(runs: Sequence[ReportedRun]) -> list[Drawing]:
    """Return timelines of the runs that have events; a figure has up to :data:`ROWS` runs."""
    found = [(run, timeline(run.events, run.ended or run.seen)) for run in runs if run.events]
    found = [(run, one) for run, one in found if one.start is not None]
    if not found:
        return []
    starts = [one.start or 0.0 for _, one in found]
    lengths = [(one.end or 0.0) - (one.start or 0.0) for _, one in found]
    whole = max((one.end or 0.0) for _, one in found) - min(starts)
    aligned = whole > _ALIGN * max(lengths)
    parts = [found[at : at + ROWS] for at in range(0, len(found), ROWS)]
    with style():
        return [
            _timeline(
                part, min(starts), max(lengths) if aligned else whole, number, len(parts), aligned
            )
            for number, part in enumerate(parts, 1)
        ]


def _timeline(
    rows: Sequence[tuple[ReportedRun, Timeline]],
    zero: float,
    span: float,
    number: int,
    total: int,
    aligned: bool,
) -> Drawing:
    scale, unit = _unit(span)
    figure, axes = _bars(len(rows))
    titles: dict[str, str] = {}
    for at, (run, one) in enumerate(rows):
        base = (one.start or 0.0) if aligned else zero
        for place, part in enumerate(one.spans):
            gid = f"run{at}-span{place}"
            left, width = (part.start - base) / scale, (part.end - part.start) / scale
            axes.barh(at, width, left=left, height=0.62, color=_SPANS[part.kind][0], lw=0)[
                0
            ].set_gid(gid)
            titles[gid] = f"{run.key}: {_SPANS[part.kind][1]}, {_duration(part.end - part.start)}"
        _draw_marks(axes, at, run, one, base, scale, titles)
    _name_rows(axes, [run.key for run, _ in rows])
    axes.set_xlim(0, max(span, 1.0) / scale * 1.02)
    zero_is = "since the first submission of each run" if aligned else "since the first submission"
    axes.set_xlabel(f"{unit} {zero_is}")
    kinds = {part.kind for _, one in rows for part in one.spans}
    marks = {mark.kind for _, one in rows for mark in one.marks}
    _span_legend(figure, kinds, marks)
    title = "Timeline of each run" + (f" ({number} of {total})" if total > 1 else "")
    caption = "Spans and ends of each run, from its event log. Suspended time is part of its span."
    if aligned:
        caption += " Each run begins at zero, because the runs are far apart."
    name = "timeline" if total == 1 else f"timeline-{number}"
    return Drawing(name, title, caption, figure, titles, wide=True)


def _draw_marks(
    axes: Any,
    at: int,
    run: ReportedRun,
    one: Timeline,
    base: float,
    scale: float,
    titles: dict[str, str],
) -> None:
    saves = [(mark.time - base) / scale for mark in one.marks if mark.kind == SAVED]
    if saves:
        # More lines than pixels would not be visible.
        wide = one.end is not None and (one.end - base) / scale / _MOST_SAVES
        shown = sorted({int(x / wide): x for x in saves}.values()) if wide else saves[:1]
        gid = f"run{at}-saves"
        axes.vlines(shown, at - 0.31, at + 0.31, color=INK, lw=0.7, gid=gid)
        titles[gid] = f"{run.key}: {several(len(saves), 'save')}"
    ends = [mark for mark in one.marks if mark.kind != SAVED]
    for place, mark in enumerate(ends):
        shape, color, words = _MARKS[mark.kind]
        gid, x = f"run{at}-mark{place}", (mark.time - base) / scale
        titles[gid] = f"{run.key}: {mark.cause or words}"
        edge = {"markeredgecolor": INK, "markeredgewidth": 0.5}
        axes.plot([x], [at], shape, color=color, ms=5.5, clip_on=False, zorder=4, gid=gid, **edge)


def goodput_figures(runs: Sequence[ReportedRun]) -> list[Drawing]:
    """Return bar charts of the parts of each run's time (goodput); a figure has up to :data:`ROWS` runs."""
    found = [(run, asdict(run.goodput)) for run in runs if run.events]
    found = [(run, parts) for run, parts in found if sum(parts.values()) > 0]
    pages = [found[at : at + ROWS] for at in range(0, len(found), ROWS)]
    with style():
        return [_goodput(page, number, len(pages)) for number, page in enumerate(pages, 1)]


def _goodput(
    rows: Sequence[tuple[ReportedRun, dict[str, float]]], number: int, total: int
) -> Drawing:
    figure, axes = _bars(len(rows))
    titles: dict[str, str] = {}
    for at, (run, parts) in enumerate(rows):
        left, whole = 0.0, sum(parts.values())
        for part, (color, words) in PARTS.items():
            share = 100 * parts[part] / whole
            if share > 0:
                gid = f"run{at}-{part}"
                axes.barh(at, share, left=left, height=0.72, color=color, lw=0)[0].set_gid(gid)
                titles[gid] = f"{run.key}: {words}, {_duration(parts[part])} ({share:.1f}%)"
            left += share
        if (ettr := run.goodput.ettr) is not None:
            axes.text(101, at, f"{ettr:.0%}", va="center", fontsize=7)
    _name_rows(axes, [run.key for run, _ in rows])
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the time since the first submission (%)")
    shown = [part for part in PARTS if any(parts[part] > 0 for _, parts in rows)]
    _legend(figure, [PARTS[part] for part in shown], [])
    title = "Goodput of each run" + (f" ({number} of {total})" if total > 1 else "")
    caption = (
        "Shares of each run's time. At the right: effective training time ratio (ETTR), the productive share "
        "of all time except idle."
    )
    name = "goodput" if total == 1 else f"goodput-{number}"
    return Drawing(name, title, caption, figure, titles, wide=True)


def _bars(rows: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, _FRAME + _ROW * max(rows, 3)), layout="constrained")
    axes = figure.subplots()
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return figure, axes


def _name_rows(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [label(name, 34) for name in names], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(len(names), 3) - 0.4, -0.6)


def _span_legend(figure: Any, kinds: set[str], marks: set[str]) -> None:
    _legend(
        figure,
        [_SPANS[kind] for kind in _SPANS if kind in kinds],
        [_MARKS[kind] for kind in _MARKS if kind in marks],
    )


def _legend(
    figure: Any, parts: Sequence[tuple[str, str]], marks: Sequence[tuple[str, str, str]]
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=color, label=words, lw=0) for color, words in parts]
    handles += [
        Line2D([], [], marker=shape, color=color, ls="", ms=6, mec=INK, mew=0.5, label=words)
        for shape, color, words in marks
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=6, columnspacing=1.2)


def _unit(span: float) -> tuple[float, str]:
    return next(((scale, word) for least, scale, word in _UNITS if span >= least), (1.0, "seconds"))


def _duration(seconds: float) -> str:
    scale, unit = _unit(seconds)
    return f"{seconds / scale:.3g} {unit}"
