"""The initiating cause in the lines of a failed job, without the failures that follow from it.

A message that names a cause by itself comes before one that may follow from it, and the latter before one
about another rank; among messages of equal weight the earliest counts. No message counts if the program
continued after it.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hpcrun.diagnose.catalog import (
    RETRY_WORDS,
    KnownMessage,
    Retry,
    match,
    may_match,
    named,
    phrases,
)
from hpcrun.diagnose.collectives import Positions
from hpcrun.diagnose.read_log import LogLine
from hpcrun.diagnose.state_dict import OTHER_MODEL, WRAPPED, LoadedKeys

Confidence = Literal["high", "medium", "low"]

_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(: .*)?$")
# Python prints these tracebacks and continues.
_UNRAISED = ("Exception ignored in", "--- Logging error ---")
UNKNOWN = "unknown"
"""The id of a finding without a known cause: only the last line with an error is shown."""
_CONFIDENCE: dict[int, Confidence] = {3: "high", 2: "medium"}
_MOST_SIGHTINGS = 20_000
_MOST_EVIDENCE = 4
_TEXT = 400
# Message of a rank about an end that Slurm or a person began.
_SCHEDULER = "scheduler"
_UNEXPLAINED = {
    "exception": "an error that the catalog does not know",
    UNKNOWN: "no known failure; the last error",
}
# The reason in the event log repeats the ranks' records.
_OURS = "hpcrun: the attempt ended: "


@dataclass(frozen=True)
class FailureFinding:
    """The initiating cause of a failure.

    ``id``: the entry of the catalog; ``exception`` for an error of Python that is in no entry; ``unknown`` if
    only the last line with an error is known.
    ``confidence``: high for a message that names the cause by itself, medium for one that may follow from
    another failure, low for the first trace of an unknown failure. ``ranks``: all with the same message.
    ``cascade``: the other ranks with errors. ``folded``: the number of resulting lines, for each
    entry. ``notes``: more facts, a sentence each.
    """

    id: str
    kind: str
    cause: str
    remedy: str
    retry: Retry
    confidence: Confidence
    rank: int | None
    node: str | None
    evidence: tuple[LogLine, ...]
    ranks: tuple[int, ...]
    cascade: tuple[int, ...]
    folded: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]

    @property
    def line(self) -> str:
        """The finding in one line."""
        where = ""
        if self.rank is not None:
            where = f"rank {self.rank}" + (f" on {self.node}" if self.node else "") + ": "
        elif self.node:
            where = f"{self.node}: "
        return f"{where}{self.cause}; {RETRY_WORDS[self.retry]}"


@dataclass(frozen=True)
class _Sighting:
    """A line with a known message, or with an unknown error.

    ``advances``: the steps of the log before the line. ``raised``: the line ends a traceback. ``quiet``: the
    line itself is only a warning.
    """

    line: LogLine
    entry: KnownMessage | None
    order: int
    advances: int
    raised: bool
    quiet: bool = False
    unknown: bool = False

    @property
    def level(self) -> int:
        level = self.entry.level if self.entry else 2
        return min(level, 1) if self.quiet else level

    @property
    def id(self) -> str:
        return self.entry.id if self.entry else UNKNOWN if self.unknown else "exception"

    @property
    def scheduler(self) -> bool:
        return self.entry is not None and self.entry.kind == _SCHEDULER


def find_cause(lines: Iterable[LogLine], nodes: int = 0) -> FailureFinding | None:
    """Return the initiating cause that ``lines`` show; None if they show no failure.

    Args:
            lines: the lines of all logs of one attempt, each log in its order. Facts with a time come first.
            nodes: the number of nodes of the job, if known.
    """
    seen = _Seen(nodes)
    for line in lines:
        seen.add(line)
    return seen.finding()


class _Seen:
    """Known messages found so far, up to a maximum number."""

    def __init__(self, nodes: int) -> None:
        self._all_nodes = nodes
        self._first: dict[tuple[str, int | None, str | None, str], _Sighting] = {}
        self._counts: Counter[str] = Counter()
        self._ranks: set[int] = set()
        self._nodes: dict[int, str] = {}
        self._named_nodes: set[str] = set()
        # For each source, the label before its traceback, and whether Python ignores the exception.
        self._tracebacks: dict[tuple[str, int | None], tuple[str, bool]] = {}
        self._unknown: _Sighting | None = None
        self._progress: dict[str, Progress] = {}
        self._positions = Positions()
        self._keys: dict[tuple[str, int | None], LoadedKeys] = {}
        self._order = 0

    def add(self, line: LogLine) -> None:
        """Read a line."""
        self._order += 1
        if line.rank is not None:
            self._ranks.add(line.rank)
            if line.node:
                self._nodes.setdefault(line.rank, line.node)
        if line.node and len(self._named_nodes) < _MOST_SIGHTINGS:
            self._named_nodes.add(line.node)
        progress = self._progress.setdefault(line.file, Progress())
        progress.add(line.text, self._order)
        raised = self._follow_traceback(line)
        certain = raised or line.failure
        if raised is None or not (certain or may_match(line.text)):
            return
        if not certain and phrases("handled").search(line.text):
            return
        entry = match(line.text[:4000])
        quiet = not certain and is_warning(line.text)
        sighting = _Sighting(line, entry, self._order, progress.advances, raised)
        if entry is not None and entry.id == OTHER_MODEL:
            self._keys.setdefault((line.file, line.rank), LoadedKeys()).add(line.text)
        if entry is not None:
            self._keep(replace(sighting, quiet=quiet and entry.level > 0))
            if "ank " in line.text:
                self._positions.add(line.text, line.rank)
        elif certain:
            self._keep(sighting)
        elif not quiet and phrases("error").search(line.text[:400]):
            self._unknown = replace(sighting, unknown=True)

    def _follow_traceback(self, line: LogLine) -> bool | None:
        """Return True for the exception at the end of a traceback; None if Python ignores the exception."""
        source = (line.file, line.rank)
        label, ignored = self._tracebacks.get(source, ("", False))
        if line.text.startswith(_UNRAISED):
            self._tracebacks[source] = "", True
        elif _TRACEBACK in line.text:
            label = line.text.partition(_TRACEBACK)[0].removesuffix("Original ")
            self._tracebacks[source] = label, ignored
        elif source in self._tracebacks:
            text = line.text[len(label) :]
            # The label before a line may be a time.
            same = re.sub(r"\d", "0", line.text[: len(label)]) == re.sub(r"\d", "0", label)
            if same and text.strip() and not text[0].isspace():
                del self._tracebacks[source]
                if _EXCEPTION.match(text):
                    return None if ignored else True
        return False

    def _keep(self, sighting: _Sighting) -> None:
        self._counts[sighting.id] += 1
        line = sighting.line
        if not sighting.quiet:
            self._progress[line.file].failed = sighting.order
        key = (sighting.id, line.rank, line.node, line.file)
        known = self._first.get(key)
        if known is None and len(self._first) >= _MOST_SIGHTINGS:
            return
        if known is None or known.quiet > sighting.quiet or self._handled(known):
            self._first[key] = sighting

    def _handled(self, one: _Sighting) -> bool:
        """Return True if the program continued after the message."""
        launcher = one.id.startswith(("slurm-", "step-", "task-")) or one.scheduler
        steps = not launcher and not (one.raised and one.level > 1)
        progress = self._progress[one.line.file]
        return not one.line.failure and progress.continued(one.order, one.advances, steps=steps)

    def finding(self) -> FailureFinding | None:
        """Choose the log line of the first error, and describe it."""
        wrapper = self._name_wrappers()
        first = (one for one in self._first.values() if not self._handled(one))
        alive = sorted(first, key=lambda one: one.order)
        if all(one.quiet for one in alive):
            alive = []
        candidates = [one for one in alive if one.level > 0]
        if not candidates:
            # Only teardown: the lines do not contain the failure itself.
            if self._unknown and not self._handled(self._unknown):
                alive = [self._unknown]
            return self._describe(alive[0], []) if alive else None
        best = _earliest(candidates)
        if best.scheduler:
            best = _before_the_end(best, candidates) or best
        finding = self._describe(best, candidates)
        if best.id == WRAPPED and wrapper:
            finding = replace(finding, notes=(wrapper, *finding.notes))
        return finding

    def _name_wrappers(self) -> str:
        """Let the keys of a checkpoint decide between another model and a wrapper; return what they show."""
        wrappers = {source: keys.wrapper() for source, keys in self._keys.items()}
        if not wrappers or not all(wrappers.values()):
            return ""
        self._first = {
            key: replace(one, entry=named(WRAPPED)) if one.id == OTHER_MODEL else one
            for key, one in self._first.items()
        }
        self._counts[WRAPPED] += self._counts.pop(OTHER_MODEL, 0)
        return next(filter(None, wrappers.values()), "")

    def _describe(self, best: _Sighting, candidates: list[_Sighting]) -> FailureFinding:
        same = [one for one in self._first.values() if one.id == best.id]
        if best.entry is None:
            same = [one for one in same if one.line.text == best.line.text]
        ranks = sorted({one.line.rank for one in same if one.line.rank is not None})
        cascade = sorted(
            {one.line.rank for one in self._first.values() if one.line.rank is not None}
            - set(ranks)
        )
        rank, node = best.line.rank, best.line.node
        notes: list[str] = []
        if best.id in ("collective-timeout", "watchdog-stuck"):
            reported = self._positions.laggards(self._ranks)
            if reported:
                rank, node = (reported[0][0] if reported[0] else None), None
                notes.append(reported[1])
            elif best.line.line and len(ranks) > 1:
                # Each of them only waited.
                rank, node = None, None
        elif (
            node is None
            and rank is None
            and len(named := {one.line.node for one in same} - {None}) == 1
        ):
            # slurmstepd may not name its node; srun's line about the task does.
            (node,) = named
        if rank is None and node and len(ranks) == 1 and self._nodes.get(ranks[0]) == node:
            # slurmstepd names only its node, srun the task.
            (rank,) = ranks
        if rank is not None and node is None:
            node = self._nodes.get(rank)
        text = _shortened(best.line.text)
        finding = FailureFinding(
            id=best.id,
            kind=best.entry.kind if best.entry else "program",
            cause=best.entry.cause if best.entry else f"{_UNEXPLAINED[best.id]}: {text}",
            remedy=best.entry.remedy if best.entry else "read the log around this line",
            retry=best.entry.retry if best.entry else "unlikely",
            confidence=_CONFIDENCE.get(best.level, "low") if best.entry else "low",
            rank=rank,
            node=node,
            evidence=tuple(one.line for one in _evidence(best, same)),
            ranks=tuple(ranks),
            cascade=tuple(cascade),
            folded=tuple(
                (name, count) for name, count in self._counts.most_common() if name != best.id
            ),
            notes=(),
        )
        notes += self._others(best, candidates)
        return self._on_one_node(replace(finding, notes=tuple(notes)), same)

    def _others(self, best: _Sighting, candidates: list[_Sighting]) -> list[str]:
        """Name further initiating causes: the reader may know better which was first."""
        others: dict[str, _Sighting] = {}
        for one in candidates:
            if one.level == 3 and one.id != best.id:
                others.setdefault(one.id, one)
        return [
            f"also seen: {one.entry.cause} ({one.line.place})"
            for one in list(others.values())[:3]
            if one.entry
        ]

    def _on_one_node(self, finding: FailureFinding, same: list[_Sighting]) -> FailureFinding:
        """Add the node to the finding if only one of several nodes shows the cause."""
        nodes = {
            node
            for one in same
            if (
                node := one.line.node
                or self._nodes.get(-1 if one.line.rank is None else one.line.rank)
            )
        }
        known = len(self._named_nodes | set(self._nodes.values()))
        total = max(known, self._all_nodes)
        if len(nodes) != 1 or total < 2 or finding.kind not in ("environment", "storage"):
            return finding
        (node,) = nodes
        note = f"only {node} of {total} nodes shows it"
        return replace(finding, node=node, retry="elsewhere", notes=(*finding.notes, note))


def _earliest(candidates: list[_Sighting]) -> _Sighting:
    strongest = max(one.level for one in candidates)
    best = [one for one in candidates if one.level == strongest]
    if all(one.line.time is not None for one in best):
        return min(best, key=lambda one: (one.line.time, one.order))
    return best[0]


def _before_the_end(end: _Sighting, candidates: list[_Sighting]) -> _Sighting | None:
    """Return the failure that happened before the scheduler ended the job."""
    for one in sorted(candidates, key=lambda one: (-one.level, one.order)):
        if one.scheduler or one.level < 2:
            continue
        if one.line.file == end.line.file:
            earlier = one.order < end.order
        elif one.line.time is not None and end.line.time is not None:
            earlier = one.line.time < end.line.time
        else:
            earlier = one.level == 3
        if earlier:
            return one
    return None


def _evidence(best: _Sighting, same: list[_Sighting]) -> list[_Sighting]:
    """Return the line, and lines of other ranks or files with the same message."""
    others = sorted(
        (one for one in same if one is not best and not one.line.text.startswith(_OURS)),
        key=lambda one: one.order,
    )
    return [best, *others][:_MOST_EVIDENCE]


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} …"


_STEP = re.compile(
    r"(epoch|step|iter|iteration|update|batch)s?[\"' ]{0,2}[:=#\[(]?[\[( ]{0,3}(\d+)|\|\s*()(\d+)/\d+ \["
)
_WORDS = ("epoch", "step", "iter", "update", "batch", "|")
_ENDS = ("complete", "finish", "success", "done", "ended", " code", " status", " passed")
_ADVANCES = 2


def is_warning(text: str) -> bool:
    """Return True for a line that its program labels as a warning or as information."""
    return bool(phrases("warning").search(text[:160]) and not phrases("serious").search(text))


class Progress:
    """The steps that a log shows. ``failed``: the order of the last line with a failure."""

    def __init__(self) -> None:
        self.advances = self.failed = self._succeeded = 0
        self._newest: dict[tuple[str, ...], tuple[int, ...]] = {}

    def add(self, text: str, order: int) -> None:
        """Read a line; ``order`` counts the lines of all logs."""
        text = text[-400:].lower()
        # wandb prints a summary after a failure too; indented lines belong to a traceback.
        if text.startswith("wandb:") or (text[:1].isspace() and "|" not in text):
            return
        if any(word in text for word in _WORDS):
            steps = {one[1] or one[3]: int(one[2] or one[4]) for one in _STEP.finditer(text)}
            numbers = tuple(steps.values())
            # A repeated step, of another rank or after a restart, is no progress.
            if steps and numbers > self._newest.get(tuple(steps), ()):
                self._newest[tuple(steps)] = numbers
                self.advances += 1
        if any(word in text for word in _ENDS) and phrases("success").search(text):
            self._succeeded = order

    def continued(self, order: int, advances: int, *, steps: bool) -> bool:
        """Return True if the program succeeded or made progress after a line.

        Args:
            advances: the value at that line.
            steps: steps count too. A failed program may flush its output after its traceback, and output of
                ranks may overtake a message of the launcher: then only a success counts.
        """
        succeeded = self._succeeded > max(order, self.failed)
        return succeeded or (steps and self.advances - advances >= _ADVANCES)
