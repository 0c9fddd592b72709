"""Output of a diagnosis: as lines of text, and as JSON."""

from typing import Any

from hpcrun.diagnose.catalog import RETRY_WORDS
from hpcrun.diagnose.finding import UNKNOWN, FailureFinding
from hpcrun.diagnose.log_line import LogLine
from hpcrun.diagnose.stacks import ranges

_LINE = 300


def report(finding: FailureFinding, notes: list[str]) -> list[str]:
    """Return the diagnosis as a few lines of text; :func:`hpcrun.printing.say` escapes them."""
    if finding.id == UNKNOWN:
        quoted = ["hpcrun: no known failure; the last error is", *_evidence(finding)]
        return [*quoted, *(f"note      {note}" for note in notes)]
    lines = [
        f"cause     {finding.cause} ({finding.id}, confidence {finding.confidence})",
        *([f"where     {where}"] if (where := _where(finding)) else []),
        *_evidence(finding),
        f"remedy    {finding.remedy}",
        f"retry     {RETRY_WORDS[finding.retry]}",
    ]
    if finding.cascade:
        lines.append(f"cascade   {_ranks(finding.cascade)} then failed because of it")
    if finding.folded:
        folded = ", ".join(f"{name} {count}" for name, count in finding.folded[:6])
        lines.append(f"folded    lines that follow from it: {folded}")
    lines += [f"note      {note}" for note in (*finding.notes, *notes)]
    return lines


def as_data(finding: FailureFinding | None, notes: list[str]) -> dict[str, Any]:
    """Return the diagnosis for JSON; ``found`` is false without a cause."""
    if finding is None:
        return {"found": False, "notes": notes}
    return {
        "found": finding.id != UNKNOWN,
        "id": finding.id,
        "kind": finding.kind,
        "cause": finding.cause,
        "remedy": finding.remedy,
        "retry": finding.retry,
        "confidence": finding.confidence,
        "rank": finding.rank,
        "node": finding.node,
        "ranks": list(finding.ranks),
        "cascade": list(finding.cascade),
        "folded": dict(finding.folded),
        "evidence": [_line_as_data(line) for line in finding.evidence],
        "notes": [*finding.notes, *notes],
        "line": finding.line,
    }


def _line_as_data(line: LogLine) -> dict[str, Any]:
    return {
        "file": line.file,
        "line": line.line,
        "rank": line.rank,
        "node": line.node,
        "time": line.time,
        "text": line.text,
    }


def _where(finding: FailureFinding) -> str:
    parts = []
    if finding.rank is not None:
        parts.append(f"rank {finding.rank}")
    if finding.node:
        parts.append(f"node {finding.node}")
    if len(finding.ranks) > 1:
        parts.append(f"the same message on {_ranks(finding.ranks)}")
    return ", ".join(parts)


def _evidence(finding: FailureFinding) -> list[str]:
    lines = []
    for line in finding.evidence:
        text = " ".join(line.text.split())
        text = text if len(text) <= _LINE else f"{text[:_LINE]} …"
        lines.append(f"evidence  {line.place}: {text}")
    return lines


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {ranges(ranks)}"
