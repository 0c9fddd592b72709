"""The tables of a report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from hpcrun.printing import escaped
from hpcrun.results.report.efficiency import Efficiency
from hpcrun.results.report.report_content import Content
from hpcrun.results.report.runs import ReportedRun
from hpcrun.results.report.sweep import Sensitivity, number, shown
from hpcrun.results.statistics import ConfidenceInterval, describe

_MOST_KEYS = 6
_MOST_SEEDS = 12


def state_mark(state: str) -> Markup:
    """Return an HTML element with the state, in the color of the state."""
    kind = state if state in ("finished", "failed") else "other"
    return element("span", state, class_=f"mark {kind}")


def groups_table(content: Content) -> Markup:
    """Return a row for each config: n, mean, interval, IQM, best."""
    rows = []
    for place, group in enumerate(content.groups, 1):
        name = element("code", group.label)
        left = len(group.left_out)
        if not group.values:
            rows.append((place, name, 0, left, *("–",) * 6))
            continue
        spread = describe(group.numbers())
        best = min if content.lower else max
        top = best(group.values, key=lambda value: value.best)
        rows.append(
            (
                *(place, name, spread.n, left, figure(spread.mean.value), _interval(spread.mean)),
                *("–" if spread.std is None else figure(spread.std, 2), figure(spread.iqm.value)),
                *(figure(top.best), top.run),
            )
        )
    head = (
        *("#", "config", "n", "not counted", "mean", "95% interval", "std", "IQM"),
        *("best", "in run"),
    )
    return table(head, rows, numeric=(0, 2, 3, 4, 5, 6, 7, 8), wide=(1, 9))


def left_out(content: Content) -> list[tuple[str, str, str]]:
    """Return each run that does not count: config, run, reason."""
    return [
        (group.label, key, reason) for group in content.groups for key, _, reason in group.left_out
    ]


def left_out_table(content: Content) -> Markup:
    """Return a row for each run that does not count."""
    rows = [(element("code", label), key, why) for label, key, why in left_out(content)]
    return table(("config", "run", "why it does not count"), rows, wide=(0, 1, 2))


def missing_table(content: Content) -> Markup | None:
    """Return a row for each config without a run of a seed that other configs have."""
    rows = [
        (element("code", group.label), _few(group.missing))
        for group in content.groups
        if group.missing
    ]
    return table(("config", "seeds without a run"), rows, wide=(0, 1)) if rows else None


def _few(seeds: Sequence[Any]) -> str:
    """Name some seeds: of random configs with a seed each, every config lacks all other seeds."""
    more = f" and {len(seeds) - _MOST_SEEDS:,} more" if len(seeds) > _MOST_SEEDS else ""
    return f"{', '.join(map(str, seeds[:_MOST_SEEDS]))}{more}"


def runs_table(content: Content) -> Markup:
    """Return a row for each run, with the strongest swept parameters."""
    keys = content.swept[:_MOST_KEYS]
    head = ("run", "state", "seed", *keys, content.metric or "metric", "last step", "attempts")
    head = (*head, "wall time", "ETTR", "started")
    rows = [_run_row(content, run, keys) for run in content.runs]
    known = [run.config for run in content.runs if run.config]
    numbers = [
        at
        for at, key in enumerate(keys, 3)
        if all(number(one.get(key, 0)) is not None for one in known)
    ]
    first = 3 + len(keys)
    return table(head, rows, numeric=(2, *numbers, *range(first, first + 6)))


def _run_row(content: Content, run: ReportedRun, keys: Sequence[str]) -> tuple[object, ...]:
    value = _value(run, content)
    return (
        run.key,
        state_mark(run.state),
        "–" if run.seed is None else run.seed,
        *(shown(run.config[key]) if key in run.config else "–" for key in keys),
        "–" if value is None else figure(value, 5),
        "–" if run.step is None else f"{run.step:,}",
        run.attempts,
        duration(run.wall) if run.events else UNKNOWN,
        share(run.goodput.ettr) if run.events else UNKNOWN,
        moment(run.created),
    )


def _value(run: ReportedRun, content: Content) -> float | None:
    """Return the metric of a run, whether or not it counts."""
    if run.key in content.values:
        return content.values[run.key]
    steps, values = run.series(content.metric or "")
    if content.at.isdigit():
        values = values[steps == int(content.at)]
    if not len(values):
        return None
    if content.at == "best":
        return float(values.min() if content.lower else values.max())
    return float(values[-1])


def relations_table(relations: Sequence[Sensitivity]) -> Markup:
    """Return a row for each swept parameter with its relation to the metric."""
    rows = [
        (
            element("code", one.key),
            len(set(one.x.tolist())),
            len(one.y),
            "–" if one.rho is None else f"{one.rho:+.2f}",
            "–" if one.eta is None else f"{one.eta:.2f}",
        )
        for one in relations
    ]
    head = ("parameter", "values", "n", "rank correlation ρ", "share of variance η²")
    return table(head, rows, numeric=(1, 2, 3, 4))


def efficiency_table(rows: Sequence[Efficiency]) -> Markup:
    """Return the requested and the used resources of each run that began, and the next request."""
    head = (
        *("run", "GPUs asked", "GPUs busy", "MFU", "GPU memory used", "CPUs asked", "CPUs used"),
        *("memory per node requested", "used", "time limit", "longest attempt", "data wait"),
        *("measured by", "next request"),
    )
    return table(head, map(_efficiency_row, rows), numeric=range(1, 12), wide=(13,))


def _efficiency_row(one: Efficiency) -> tuple[object, ...]:
    cpu_only = one.gpus == 0
    bound = "≤ " if one.bound and one.memory_used is not None else ""
    return (
        one.run.key,
        UNKNOWN if one.gpus is None else one.gpus,
        "–" if cpu_only else UNKNOWN if one.gpu_busy is None else f"{one.gpu_busy:.0f}%",
        "–" if cpu_only else share(one.mfu),
        "–" if cpu_only else size(one.gpu_memory),
        UNKNOWN if one.cpus is None else one.cpus,
        UNKNOWN if one.cpus_used is None else f"{one.cpus_used:.1f}",
        size(one.memory),
        text(bound, size(one.memory_used)),
        duration(one.time_limit),
        duration(one.longest),
        share(one.data_share),
        ", ".join(one.sources) or "nothing",
        _advice(one),
    )


def _advice(one: Efficiency) -> object:
    if one.advice:
        return [element("div", words) for words in one.advice]
    return "no evidence for a change"


def config_table(run_config: dict[str, str]) -> Markup:
    """Return the config that all runs share."""
    rows = [(element("code", key), element("code", value)) for key, value in run_config.items()]
    return table(("key", "value"), rows, wide=(1,))


def _interval(interval: ConfidenceInterval) -> str | Markup:
    if interval.low is None or interval.high is None:
        return "–"
    return text(figure(interval.low), " … ", figure(interval.high))


_VOID = ("meta", "br", "hr")


class Markup(str):
    """Text that is already HTML; other text is escaped."""


def element(tag: str, *children: object, **attributes: str) -> Markup:
    """Return an element; ``class_`` is the attribute class. None and False children are left out."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for name, value in attributes.items()
    )
    if tag in _VOID:
        return Markup(f"<{tag}{named}>")
    return Markup(f"<{tag}{named}>{text(*children)}</{tag}>")


def text(*children: object) -> Markup:
    """Return the joined children; text that is not markup is escaped.

    Control characters become visible escapes: a log line may hold a sequence that a terminal obeys
    after it is copied from the page.
    """
    return Markup("".join(map(_child, children)))


def _child(child: object) -> str:
    if child is None or child is False:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, list | tuple):
        return text(*child)
    return escape(escaped(str(child)))


def table(
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    numeric: Iterable[int] = (),
    wide: Iterable[int] = (),
) -> Markup:
    """Return a table in a box that scrolls.

    Args:
        numeric: columns that are aligned to the right.
        wide: columns of long texts, which get room for a line of words.
    """
    classes = dict.fromkeys(numeric, "n") | dict.fromkeys(wide, "w")

    def cells(tag: str, row: Sequence[object]) -> Markup:
        return text(
            *(
                element(tag, cell, **({"class_": classes[at]} if at in classes else {}))
                for at, cell in enumerate(row)
            )
        )

    body = [element("tr", cells("td", row)) for row in rows]
    whole = element(
        "table",
        element("thead", element("tr", cells("th", head))),
        element("tbody", *body),
    )
    return element("div", whole, class_="box")


UNKNOWN = element("span", "unknown", class_="unknown")


def figure(value: float | None, digits: int = 4) -> str | Markup:
    """Return a number with ``digits`` significant digits."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"


def duration(seconds: float | None) -> str | Markup:
    """Return seconds as 2 d 03:04, 03:04:05 or 41 s."""
    if seconds is None:
        return UNKNOWN
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d}:{minutes:02d}" if days else f"{hours}:{minutes:02d}:{rest:02d}"


def size(count: float | None) -> str | Markup:
    """Return bytes in GiB or MiB."""
    if count is None:
        return UNKNOWN
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def share(value: float | None) -> str | Markup:
    """Return a share as percent."""
    return UNKNOWN if value is None else f"{value:.0%}"


def moment(seconds: float | None) -> str | Markup:
    """Return Unix seconds as date and time in UTC."""
    if seconds is None:
        return UNKNOWN
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):
        # A damaged record; a year beyond 9999 is no date of a run.
        return UNKNOWN
