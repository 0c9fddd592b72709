"""The HTML page of the report, and its files, each written atomically."""

from __future__ import annotations

import json
import os
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from hpcrun.drafts import SPECIAL, is_special
from hpcrun.errors import UserError
from hpcrun.printing import escaped
from hpcrun.results.groups import BEST_IS_BIASED
from hpcrun.results.report.content import MOST_CURVES, Content, ReportRequest, collect, shown
from hpcrun.results.report.runs import counts
from hpcrun.results.report.words import duration, metric_label, several
from hpcrun.results.store import ResultsFile, package_version
from hpcrun.run.files import write_atomic

# Mark of a report of hpcrun, so that no other file is replaced by mistake.
_HEAD = "<!DOCTYPE html>"
_SECTIONS = {
    "compare": "Comparison",
    "curves": "Curves",
    "parameters": "Parameters",
    "runs": "All runs",
    "failures": "Failures",
    "methods": "Methods and data",
}
_X_NAMES = {"time": "hours since the first logged row"}


def write_report(store: ResultsFile, request: ReportRequest, output: Path) -> str:
    """Write the report of ``store`` to ``output``, atomically; return words about it.

    Raises:
        UserError: there are no runs.
        ResultsError: no run has the metric.
        OSError: the disk refused; ``output`` is unchanged.
    """
    content = collect(store, request)
    page = whole_page(content, main_part(content))
    # A symbolic link stays: its target is replaced. The umask decides who may read.
    write_atomic(Path(os.path.realpath(output)), page, mode=0o666)
    states = ", ".join(f"{count:,} {state}" for state, count in counts(content.runs).items())
    return f"{several(len(content.runs), 'run')} ({states})"


def require_place(output: Path) -> None:
    """Raise UserError before any work if the report cannot be written to its place.

    Raises:
        UserError: the folder is missing, or a file of another kind is in the way.
    """
    if output.is_dir():
        raise UserError(f"{output}: is a directory; name a file, such as {output / 'report.html'}")
    if is_special(output.resolve()):
        raise UserError(f"{output}: {SPECIAL}; choose another -o")
    folder = output.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{folder}: no such directory; make it, or choose another -o")
    if output.is_file():
        with output.open("rb") as stream:
            head = stream.read(len(_HEAD)).decode(errors="replace")
        if head and head.lower() != _HEAD.lower():
            raise UserError(
                f"{output}: is not an HTML report, and would be replaced; choose another -o"
            )


def main_part(content: Content) -> str:
    """Return the part of the page that changes while runs train: tables, controls and the data of figures."""
    names = {name: metric_label(name) for name in content.data["metrics"]}
    data = {**content.data, "names": names | _X_NAMES}
    # No text of a run can end the element.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    metrics = list(names.items())
    return _render(
        "page.main.html",
        caution=BEST_IS_BIASED,
        content=content,
        data=Markup(text.replace("<", "\\u003c")),
        metrics=metrics,
        most_curves=MOST_CURVES,
        scatter_axes=[(key, key) for key in content.data["keys"]] + metrics,
        states=counts(content.runs).items(),
        x_axes=[(name, _X_NAMES.get(name, name)) for name in content.data["x"]],
    )


def whole_page(content: Content, main: str, *, live: int = 0) -> str:
    """Return the page with its scripts.

    Args:
        live: seconds after which the page asks its server again; 0: never.
    """
    folder = files("hpcrun.results.report")
    style, figures, groups = (
        folder.joinpath(f"page.{suffix}").read_text(encoding="utf-8")
        for suffix in ("css", "figures.js", "js")
    )
    scripts = [get_plotlyjs(), figures, groups]
    digests = [sha256(one.encode()).digest() for one in scripts]
    hashes = " ".join(f"'sha256-{b64encode(one).decode()}'" for one in digests)
    return _render(
        "page.html",
        content=content,
        # Parallel coordinates compile their shaders.
        hashes=Markup(f"{hashes} 'unsafe-eval'"),
        live=live,
        main=Markup(main),
        scripts=list(map(Markup, scripts)),
        sections=_SECTIONS.items(),
        style=Markup(style),
        version=package_version("hpcrun"),
    )


def _render(name: str, **values: Any) -> str:
    page = Environment(autoescape=True, finalize=_text, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {
        "duration": duration,
        "folder": os.path.dirname,
        "moment": moment,
        "several": several,
        "shown": shown,
        "tally": tally,
    }
    source = files("hpcrun.results.report").joinpath(name).read_text(encoding="utf-8")
    return f"{page.from_string(source).render(values).strip()}\n"


def _text(value: Any) -> Any:
    """Return a value for the page: None is unknown, control characters become visible escapes.

    A log line may hold a sequence that a terminal obeys after it is copied from the page.
    """
    if value is None:
        return Markup('<span class="unknown">unknown</span>')
    return value if isinstance(value, Markup) else escaped(str(value))


def tally(values: Iterable[Any]) -> list[tuple[str, int]]:
    """Return the different values in words with their numbers, the most frequent first."""
    return Counter(
        "unknown" if value in (None, "") else shown(value) for value in values
    ).most_common()


def moment(seconds: float | None) -> str | None:
    """Return Unix seconds as date and time in UTC; None for a damaged record, such as the year 10,000."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds)) if seconds else None
    except (OverflowError, OSError, ValueError):
        return None
