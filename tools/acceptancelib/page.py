"""The page on the terminal and the JSON file. Without torch."""

import math
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from acceptancelib.outcome import RESULTS, Outcome

WIDTH = 110
_CHECK, _NAME, _RESULT = 12, 30, 8
_BEFORE = _CHECK + _NAME + _RESULT


def heading(machine: str) -> str:
    """Return the first lines of the page."""
    title = f"{'check':<{_CHECK}}{'item':<{_NAME}}{'result':<{_RESULT}}"
    return f"hpcrun GPU acceptance: {machine}\n\n{title.rstrip()}\n{'-' * WIDTH}"


def lines(check: str, outcome: Outcome) -> str:
    """Return the lines of an outcome: the sentence, and the remedy if there is one."""
    result = "FAIL" if outcome.result == "fail" else outcome.result
    shown = f"{check:<{_CHECK}}{outcome.name:<{_NAME}}{result:<{_RESULT}}"
    indent = " " * 4
    text = [shown.rstrip(), *_wrapped(outcome.line, indent)]
    if outcome.remedy:
        text += _wrapped(f"-> {outcome.remedy}", indent)
    return "\n".join(text)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the count of each result."""
    counts = Counter(outcome.result for outcome in outcomes)
    return ", ".join(f"{counts[result]} {result}" for result in RESULTS if counts[result])


def document(
    machine: str, seconds: dict[str, float], found: Sequence[tuple[str, Outcome]], **more: Any
) -> dict[str, Any]:
    """Return the content of the JSON file."""
    return {
        "machine": machine,
        "python": sys.version.split()[0],
        **more,
        "seconds": seconds,
        "counts": dict(Counter(outcome.result for _, outcome in found)),
        "outcomes": [
            {
                "check": check,
                "item": outcome.name,
                "result": outcome.result,
                "line": outcome.line,
                "remedy": outcome.remedy,
                "details": _plain(outcome.details),
            }
            for check, outcome in found
        ],
    }


def _plain(value: Any) -> Any:
    """Return ``value`` for JSON, which has no NaN and no infinity: they become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
