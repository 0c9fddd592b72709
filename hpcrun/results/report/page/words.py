"""Numbers, times and sizes as the report writes them; a value without a measurement is "unknown"."""

from __future__ import annotations

import math
import time

from hpcrun.results.report.page.html import Markup, element

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
