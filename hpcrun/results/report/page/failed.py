"""The section of runs that did not finish, with the diagnosis of each."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcrun.diagnose.catalog import RETRY_WORDS
from hpcrun.diagnose.finding import FailureFinding
from hpcrun.results.report.failures import RunFailure
from hpcrun.results.report.page.html import Markup, element, table, text
from hpcrun.results.report.page.tables import state_mark
from hpcrun.results.report.report_content import Content

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
