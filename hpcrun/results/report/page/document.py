"""The HTML page of the report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from hpcrun.diagnose.catalog import RETRY_WORDS
from hpcrun.diagnose.finding import FailureFinding
from hpcrun.results.groups import BEST_IS_BIASED
from hpcrun.results.report.canvas import Drawing, as_svg
from hpcrun.results.report.curves import capitalized, metric_label
from hpcrun.results.report.page.tables import (
    UNKNOWN,
    Markup,
    config_table,
    duration,
    efficiency_table,
    element,
    groups_table,
    left_out,
    left_out_table,
    missing_table,
    moment,
    relations_table,
    runs_table,
    share,
    state_mark,
    table,
    text,
)
from hpcrun.results.report.panels import MOST_PANELS, Figures, chosen_rows
from hpcrun.results.report.report_content import Content
from hpcrun.results.report.runs import RunFailure, counts
from hpcrun.results.report.sweep import several, shown

# The page loads nothing: no script, no font, no picture from elsewhere.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(content: Content, figures: Figures) -> str:
    """Return the report as one HTML file."""
    page = _Page()
    sections = list(_sections(content, figures, page))
    links = [element("a", title, href=f"#{name}") for name, title, _ in sections]
    body = [
        element("section", element("h2", title), inner, id=name) for name, title, inner in sections
    ]
    whole = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("title", content.title),
            element("style", Markup(_style())),
        ),
        element("body", _header(content), element("nav", *links), *body),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{whole}\n"


class _Page:
    """The numbers of figures and tables."""

    def __init__(self) -> None:
        self._figures = self._tables = 0

    def figure(self, drawing: Drawing) -> Markup:
        """Return a figure with its number."""
        self._figures += 1
        caption = element("b", f"Figure {self._figures}. {drawing.title}. ")
        picture = element("div", Markup(as_svg(drawing)), class_="scroll")
        return element(
            "figure",
            picture,
            element("figcaption", caption, drawing.caption),
            class_="wide" if drawing.wide else "narrow",
            id=f"figure-{drawing.name}",
        )

    def figures(self, drawings: Sequence[Drawing]) -> Markup:
        """Return figures, the narrow ones next to each other."""
        inner = [self.figure(drawing) for drawing in drawings]
        if any(drawing.wide for drawing in drawings):
            return text(*inner)
        return element("div", *inner, class_="figures")

    def table(self, caption: str, whole: Markup) -> Markup:
        """Return a table with its number and caption above."""
        self._tables += 1
        words = element("b", f"Table {self._tables}. ")
        return element("figure", element("figcaption", words, caption), whole)


def _version() -> str:
    """Return the version of this package; the package itself would import more than a report needs."""
    try:
        return version("hpcrun")
    except PackageNotFoundError:
        return "of a checkout"


def _style() -> str:
    return files("hpcrun.results.report.page").joinpath("report.css").read_text(encoding="utf-8")


def _header(content: Content) -> Markup:
    by = (
        f"hpcrun {_version()}. Written {moment(content.written)}; runs read {moment(content.read)}."
    )
    facts = [
        element("div", element("dt", name), element("dd", value)) for name, value in _facts(content)
    ]
    return element(
        "header",
        element("h1", content.title),
        element("p", by, class_="by"),
        element("dl", *facts, class_="facts"),
    )


def _facts(content: Content) -> Iterator[tuple[str, object]]:
    runs = content.runs
    yield "runs", len(runs)
    yield from ((state, count) for state, count in counts(runs).items())
    if content.groups:
        yield "configs", len(content.groups)
    yield "attempts", sum(run.attempts for run in runs)
    timed = [run.goodput for run in runs if run.events]
    if timed:
        wall = sum(one.wall for one in timed)
        wanted = wall - sum(one.idle for one in timed)
        yield "time of all runs", duration(wall)
        yield "productive", share(sum(one.productive for one in timed) / wanted if wanted else None)
    yield "executor", _listed(Counter(run.executor or "unknown" for run in runs))


def _sections(content: Content, figures: Figures, page: _Page) -> Iterator[tuple[str, str, Markup]]:
    yield "runs", "What ran", _what_ran(content, page)
    yield "curves", "Curves", _or_note(page, figures.curves, "No run has logged a metric.")
    yield "sensitivity", "Sensitivity to each swept parameter", _sensitivity(content, figures, page)
    yield "throughput", "Throughput and goodput", _throughput(content, figures, page)
    note = "No run has an event log, so there is no timeline."
    yield "timeline", "Timeline", text(_or_note(page, figures.timeline, note), _cut(content))
    yield "failures", "Failures", failures_section(content)
    yield "efficiency", "Efficiency", _efficiency(content, page)
    yield "methods", "Methods and data", _methods(content, page)


def _what_ran(content: Content, page: _Page) -> Markup:
    goal = "lowest" if content.lower else "highest"
    parts: list[object] = []
    if content.metric is not None:
        words = (
            f"{capitalized(metric_label(content.metric))} ({content.at} value of each finished run; {goal} "
            "is best), by config. Intervals: t-interval of the mean. IQM: interquartile mean."
        )
        words += f" Caution: {BEST_IS_BIASED}." * (content.at == "best")
        parts.append(page.table(words, groups_table(content)))
    if left_out(content):
        words = f"{several(len(left_out(content)), 'run')} not counted in means and intervals."
        parts.append(page.table(words, left_out_table(content)))
    missing = missing_table(content)
    if missing is not None:
        words = "Seeds that other configs have, and for which these configs have no run at all."
        parts.append(page.table(words, missing))
    parts.append(page.table("All runs.", runs_table(content)))
    common = _common(content)
    if common:
        title = element("summary", f"Config that all runs share ({several(len(common), 'key')})")
        parts.append(element("details", title, config_table(common)))
    parts.append(page.table("Origin of the runs.", _origin(content)))
    return text(*parts)


def _sensitivity(content: Content, figures: Figures, page: _Page) -> Markup:
    if not content.swept:
        return element("p", _without_sweep(content))
    if not content.relations:
        return element("p", "Too few finished runs differ in: ", ", ".join(content.swept), ".")
    metric = metric_label(content.metric or "")
    parts: list[object] = [
        element(
            "p",
            "Observed relations, not effects: where parameters were changed together, the figures cannot "
            "separate them. The strongest relation comes first.",
        ),
        page.figures(figures.relations),
    ]
    if len(content.relations) > MOST_PANELS:
        parts.append(
            element("p", f"Panels show {MOST_PANELS} of {len(content.relations)} parameters.")
        )
    words = f"Relation of {metric} to each swept parameter, over finished runs."
    parts += [page.figures(figures.parallel), page.table(words, relations_table(content.relations))]
    rest = [key for key in content.swept if key not in {one.key for one in content.relations}]
    if rest:
        parts.append(element("p", "Without two values among finished runs: ", ", ".join(rest), "."))
    return text(*parts)


def _without_sweep(content: Content) -> str:
    if len(content.runs) == 1:
        return "There is only one run."
    known = sum(bool(run.config) for run in content.runs)
    if known < 2:
        return "Fewer than two runs have a config, so it is unknown in what the runs differ."
    commands = {str(run.config.get("command")) for run in content.runs}
    if len(commands) > 1:
        return "The runs differ in the words of their commands, and these have no names."
    return "The configs of the runs are equal, except for the seed: no parameter was swept."


def _throughput(content: Content, figures: Figures, page: _Page) -> Markup:
    return text(
        _or_note(page, figures.throughput, "No run has logged a throughput."),
        _or_note(page, figures.goodput, "No run has an event log, so goodput is unknown."),
        _cut(content),
    )


def _efficiency(content: Content, page: _Page) -> Markup:
    began = len(content.efficiency)
    parts: list[object] = []
    if content.sacct_note:
        parts.append(element("p", f"Without accounting: {content.sacct_note}."))
    words = (
        f"Requested and used resources of {several(began, 'run')} that began. Unknown: not measured. “≤”: "
        "peaks "
        "of tasks added, which may come at different times. A next request leaves a quarter above the "
        "highest use."
    )
    parts.append(page.table(words, efficiency_table(content.efficiency)))
    return text(*parts)


def _methods(content: Content, page: _Page) -> Markup:
    parts: list[object] = [
        element(
            "p",
            "Finished runs count in means, bands and intervals; all other runs are listed. Intervals are "
            "95% t-intervals over runs with different seeds, for n > 1. Rows that a restart computed again "
            "count once. Between two logged steps a curve is interpolated. Goodput and timelines come from "
            "the event log; of a run without a result they end at its last sign of life.",
        )
    ]
    if content.problems:
        words = f"{several(len(content.problems), 'problem')} in files; the rest is in the report."
        parts.append(
            page.table(words, table(("run", "file", "problem"), content.problems, wide=(2,)))
        )
    else:
        parts.append(element("p", "No file was damaged, missing or torn."))
    return text(*parts)


def _origin(content: Content) -> Markup:
    runs = content.runs
    rows: list[tuple[str, object]] = [
        (
            "command",
            _listed(Counter(str(run.identity.get("command") or "unknown") for run in runs), 2),
        ),
        ("commit", _listed(Counter(_commit(run.identity.get("git")) for run in runs))),
        ("user", _listed(Counter(str(run.identity.get("user") or "unknown") for run in runs))),
        ("Python", _listed(Counter(str(run.identity.get("python") or "unknown") for run in runs))),
        ("versions", _listed(Counter(_versions(run.identity.get("versions")) for run in runs))),
        ("folder", _listed(Counter(run.path.rpartition("/")[0] or "unknown" for run in runs))),
    ]
    return table(("", "value (runs)"), rows, wide=(1,))


def _commit(git: object) -> str:
    if not isinstance(git, dict) or not git.get("commit"):
        return "unknown"
    dirty = " with uncommitted changes" if git.get("dirty") else ""
    return f"{str(git['commit'])[:12]}{dirty}"


def _versions(versions: object) -> str:
    if not isinstance(versions, dict) or not versions:
        return "unknown"
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _listed(found: Counter[str], most: int = 5) -> object:
    if list(found) == ["unknown"]:
        return UNKNOWN
    if len(found) == 1:
        return next(iter(found))
    lines = [element("div", f"{name} ({count})") for name, count in found.most_common(most)]
    if len(found) > most:
        lines.append(element("div", f"{len(found) - most} more"))
    return lines


def _common(content: Content) -> dict[str, str]:
    known = [run.config for run in content.runs if run.config]
    if not known:
        return {}
    return {
        key: shown(value)
        for key, value in known[0].items()
        if key != "name" and len({shown(config.get(key)) for config in known}) == 1
    }


def _or_note(page: _Page, drawings: Sequence[Drawing], note: str) -> Markup:
    return page.figures(drawings) if drawings else element("p", note)


def _cut(content: Content) -> Markup | None:
    rows = len(chosen_rows(content.runs))
    if rows == len(content.runs):
        return None
    return element(
        "p",
        f"These figures show {rows} of {len(content.runs)} runs: even samples of the finished runs and of "
        "the other runs. The tables have all runs.",
    )


_MOST_ARTICLES = 40
_LONGEST_LINE = 400


def failures_section(content: Content) -> Markup:
    """Return how attempts ended, and each run that did not finish."""
    groups: dict[object, list[RunFailure]] = {}
    for one in content.failures:
        groups.setdefault(_kind(one), []).append(one)
    equal = list(groups.values())
    none = element("p", "Each run that ended has finished or was canceled.")
    return text(
        _interruptions(content),
        *map(_article, equal[:_MOST_ARTICLES]),
        None if equal else none,
        _rest([one for same in equal[_MOST_ARTICLES:] for one in same]),
        _stopped(content),
    )


def _kind(one: RunFailure) -> object:
    """Return a key that is equal for runs that failed in the same way, also with other numbers."""
    found = one.finding
    words = f"{found.cause} {found.evidence[0].text}" if found else f"{one.note} {one.run.reason}"
    return one.run.state, re.sub(r"\d[\d.]*(e[-+]?\d+)?", "#", words)


def _interruptions(content: Content) -> Markup:
    if not content.interruptions:
        return element("p", "No end of an attempt is recorded.")
    rows = list(content.interruptions.items())
    return text(
        element("p", "Ends of all attempts, by cause. A preempted run continues in a new attempt."),
        table(("cause of the end", "attempts"), rows, numeric=(1,)),
    )


def _article(same: Sequence[RunFailure]) -> Markup:
    """Return the article of runs that failed in the same way, with the words of the first."""
    one, run = same[0], same[0].run
    title = element("h3", ", ".join(other.run.key for other in same), " ", state_mark(run.state))
    # The reason repeats the words of the diagnosis.
    words = f"Recorded: {run.cause}" if one.finding else f"Recorded: {run.cause}: {run.reason}"
    recorded = element("p", words) if run.reason else None
    body = _finding(one.finding) if one.finding else element("p", f"Doctor: {one.note}.")
    return element("article", title, recorded, body)


def _finding(found: FailureFinding) -> Markup:
    where = [] if found.rank is None else [f"rank {found.rank}"]
    where += [f"node {found.node}"] if found.node else []
    places: dict[str, list[str]] = {}
    for line in found.evidence:
        places.setdefault(_shortened(line.text), []).append(line.place)
    lines = [
        ", ".join(found_at) + f": {words}" * (words not in found.cause)
        for words, found_at in places.items()
    ]
    return text(
        element(
            "p",
            element("b", "Doctor: "),
            f"{found.cause} ({found.id}, confidence {found.confidence})",
            f", {', '.join(where)}" if where else "",
            ".",
        ),
        element(
            "p", element("b", "Remedy: "), f"{found.remedy}. Retry: {RETRY_WORDS[found.retry]}."
        ),
        element("pre", Markup("\n").join(text(line) for line in lines)) if lines else None,
        *(element("p", f"Note: {note}.") for note in found.notes),
    )


def _rest(run_failures: Sequence[RunFailure]) -> Markup | None:
    if not run_failures:
        return None
    rows = [
        (one.run.key, state_mark(one.run.state), one.finding.line if one.finding else one.note)
        for one in run_failures
    ]
    return text(
        element("p", f"{len(run_failures)} more runs that did not finish:"),
        table(("run", "state", "doctor"), rows, wide=(2,)),
    )


def _stopped(content: Content) -> Markup | None:
    rows = [
        (run.key, state_mark(run.state), run.reason or run.cause or "–")
        for run in content.runs
        if run.state in ("cancelled", "stopped", "new")
    ]
    if not rows:
        return None
    return text(
        element("p", "Runs that were canceled or stopped, or never started:"),
        table(("run", "state", "reason"), rows, wide=(2,)),
    )


def _shortened(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} …"
