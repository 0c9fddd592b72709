"""The initiating cause in the lines of a failed job, without the failures that follow from it.

A message that names a cause by itself comes before one that may follow from it, and the latter before one
about another rank; among messages of equal weight the earliest counts. No message counts if the program
continued after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hpcrun.diagnose.frames import place
from hpcrun.diagnose.read_log import LogLine
from hpcrun.diagnose.sightings import UNKNOWN, Sighting, Sightings
from hpcrun.diagnose.state_dict import WRAPPED
from hpcrun.run.endings import LOG_ENDS
from hpcrun.run.failures.catalog import RETRY_WORDS, Retry, family
from hpcrun.run.failures.mistakes import is_of_site, is_told

__all__ = ["UNKNOWN", "Confidence", "FailureFinding", "find_cause"]

Confidence = Literal["high", "medium", "low"]

_CONFIDENCE: dict[int, Confidence] = {3: "high", 2: "medium"}
_MOST_EVIDENCE = 4
_MOST_NOTES = 3
_TASK_ENDS = ("step-aborted", "task-killed")
# slurmstepd reports them at the end of the step, after a cancellation that came later.
_REPORTED_LATE = ("slurm-out-of-memory",)
_TEXT = 400
_UNEXPLAINED = {
    "exception": "an error that the catalog does not know",
    UNKNOWN: "no known failure; the last error",
}
# The reason in the event log repeats the ranks' records.
_OURS = "hpcrun: the attempt ended: "


@dataclass(frozen=True)
class FailureFinding:
    """The initiating cause of a failure.

    ``id``: the entry or the family of the catalog; ``exception`` for an error of Python that has none;
    ``unknown`` if only the last line with an error is known.
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


def find_cause(lines: Iterable[LogLine], nodes: int = 0) -> FailureFinding | None:
    """Return the initiating cause that ``lines`` show; None if they show no failure.

    Args:
            lines: the lines of all logs of one attempt, each log in its order. Facts with a time come first.
            nodes: the number of nodes of the job, if known.
    """
    seen = Sightings()
    for line in lines:
        seen.add(line)
    return _Choice(seen, nodes).finding()


def find_certain_cause(lines: Iterable[LogLine], nodes: int = 0) -> FailureFinding | None:
    """Return the cause if no other start can help; None if one may.

    A message that a program printed before it died of a node, a network or a server proves nothing.

    Args:
            lines: as for :func:`find_cause`.
            nodes: the number of nodes of the job, if known.
    """
    seen = Sightings()
    for line in lines:
        seen.add(line)
    found = _Choice(seen, nodes).finding()
    if found is None or found.retry != "never" or found.confidence != "high":
        return None
    log = found.evidence[0].file
    if is_told(found.evidence[0].text.rpartition(LOG_ENDS)[2]):
        return None
    others = [one for one in seen.alive() if one.line.file == log and one.level > 1]
    doubtful = any(
        one.entry.retry in ("helps", "elsewhere") if one.entry else is_of_site(one.line.text)
        for one in others
    )
    return None if doubtful else found


class _Choice:
    """The choice of the initiating cause among sightings, and its description."""

    def __init__(self, seen: Sightings, nodes: int) -> None:
        self._seen = seen
        self._all_nodes = nodes

    def finding(self) -> FailureFinding | None:
        """Choose the log line of the first error, and describe it."""
        self._seen.name_wrappers()
        alive = self._seen.alive()
        if all(one.quiet for one in alive):
            alive = []
        candidates = [one for one in alive if one.level > 0]
        if not candidates:
            # Only teardown: the lines do not contain the failure itself.
            unknown = self._seen.unknown()
            alive = [unknown] if unknown else alive
            return self._describe(alive[0], []) if alive else None
        best = _earliest(candidates)
        if best.scheduler:
            best = _before_the_end(best, candidates) or best
        finding = self._describe(best, candidates)
        if best.id == WRAPPED and self._seen.wrapper:
            finding = replace(finding, notes=(self._seen.wrapper, *finding.notes))
        return finding

    def _describe(self, best: Sighting, candidates: list[Sighting]) -> FailureFinding:
        same = [one for one in self._seen.all() if one.id == best.id]
        if best.entry is None:
            same = [one for one in same if one.line.text == best.line.text]
        ranks = sorted({one.line.rank for one in same if one.line.rank is not None})
        rank, node, notes = self._place(best, same, ranks)
        others = {one.line.rank for one in self._seen.all() if one.line.rank is not None}
        others -= {*ranks, rank}
        if rank is None and node is None and not ranks and not best.launcher:
            # One of the others may be the rank of the line.
            others = set()
        text = _shortened(best.line.text)
        notes += self._others(best, candidates)
        folded = self._folded(best)
        if best.scheduler:
            notes += self._survived(best)
        known = best.entry or family(best.line.text, best.frames)
        cause = known.cause if known else _UNEXPLAINED[best.id]
        finding = FailureFinding(
            id=known.id if known else best.id,
            kind=known.kind if known else "program",
            cause=cause if best.entry else f"{cause}: {text}{place(best.frames, text)}",
            remedy=known.remedy if known else "read the log around this line",
            retry=known.retry if known else "unlikely",
            confidence=_CONFIDENCE.get(best.level, "low") if best.entry else "low",
            rank=rank,
            node=node,
            evidence=_evidence(best, same),
            ranks=tuple(ranks),
            cascade=tuple(sorted(others)),
            folded=folded,
            notes=tuple(notes),
        )
        return self._on_one_node(finding, same)

    def _place(
        self, best: Sighting, same: list[Sighting], ranks: list[int]
    ) -> tuple[int | None, str | None, list[str]]:
        """Return the rank and the node of the cause, as far as known, and what the positions show."""
        seen = self._seen
        rank, node = best.line.rank, best.line.node
        notes: list[str] = []
        named = {one.line.node for one in same} - {None}
        if best.id in ("collective-timeout", "watchdog-stuck"):
            reported = seen.positions.laggards(seen.ranks)
            if reported:
                rank, node = (reported[0][0] if reported[0] else None), None
                notes.append(reported[1])
            elif best.line.line and len(ranks) > 1:
                # Each of them only waited.
                rank, node = None, None
            notes += seen.positions.notes()
        elif rank is None and node is None and len(named) == 1:
            # slurmstepd may not name its node; srun's line about the task does.
            (node,) = named
        elif rank is None and node is None and not (best.launcher or best.unknown):
            rank, node = self._ended_task()
        if rank is None and node and len(ranks) == 1 and seen.nodes.get(ranks[0]) == node:
            # slurmstepd names only its node, srun the task.
            (rank,) = ranks
        if rank is not None and node is None:
            node = seen.nodes.get(rank)
        return rank, node, notes

    def _ended_task(self) -> tuple[int | None, str | None]:
        """Return rank and node of the only task, or the only node with tasks, that srun reports."""
        ended = {
            (one.line.rank, one.line.node)
            for one in self._seen.all()
            if one.id in _TASK_ENDS and one.line.node and one.line.text.startswith("srun: ")
        }
        ranks, nodes = {rank for rank, _ in ended}, {node for _, node in ended}
        node = nodes.pop() if len(nodes) == 1 else None
        return (ranks.pop() if len(ranks) == 1 and node else None), node

    def _folded(self, best: Sighting) -> tuple[tuple[str, int], ...]:
        """Return the resulting lines, counted for each entry."""
        counts = self._seen.counts.most_common()
        if not best.scheduler:
            # A person cancels a job for any reason; the notes name it.
            apart = (best.id, "slurm-cancelled")
            return tuple((name, count) for name, count in counts if name not in apart)
        # Others may have come before the end.
        later = {one.id for one in self._seen.all() if _is_later(one, best)}
        earlier = {one.id for one in self._seen.all() if not _is_later(one, best)}
        return tuple((name, count) for name, count in counts if name in later - earlier - {best.id})

    def _survived(self, end: Sighting) -> list[str]:
        """Name the errors that may have come before an end by the scheduler, and did not end the job."""
        known = [one for one in self._seen.all() if not _is_later(one, end) and one.id != end.id]
        errors = sorted((one for one in known if one.level > 1), key=lambda one: one.order)
        return [
            f"an error before the end: {_shortened(one.line.text)} ({one.line.place})"
            for one in errors[:_MOST_NOTES]
            if not one.scheduler
        ]

    def _others(self, best: Sighting, candidates: list[Sighting]) -> list[str]:
        """Name further initiating causes: the reader may know better which was first."""
        others: dict[str, Sighting] = {}
        for one in candidates:
            if one.level == 3 and one.id != best.id:
                others.setdefault(one.id, one)
        return [
            f"also seen: {one.entry.cause} ({one.line.place})"
            for one in list(others.values())[:_MOST_NOTES]
            if one.entry
        ]

    def _on_one_node(self, finding: FailureFinding, same: list[Sighting]) -> FailureFinding:
        """Add the node to the finding if only one of several nodes shows the cause."""
        nodes = {
            node
            for one in same
            if (
                node := one.line.node
                or self._seen.nodes.get(-1 if one.line.rank is None else one.line.rank)
            )
        }
        known = len(self._seen.named_nodes | set(self._seen.nodes.values()))
        total = max(known, self._all_nodes)
        if len(nodes) != 1 or total < 2 or finding.kind not in ("environment", "storage"):
            return finding
        (node,) = nodes
        note = f"only {node} of {total} nodes shows it"
        return replace(finding, node=node, retry="elsewhere", notes=(*finding.notes, note))


def _earliest(candidates: list[Sighting]) -> Sighting:
    strongest = max(one.level for one in candidates)
    best = [one for one in candidates if one.level == strongest]
    if all(one.line.time is not None for one in best):
        return min(best, key=lambda one: (one.line.time, one.order))
    return best[0]


def _before_the_end(end: Sighting, candidates: list[Sighting]) -> Sighting | None:
    """Return the failure that happened before the scheduler ended the job."""
    times = [one.line.time for one in candidates if one.id == end.id and one.line.time is not None]
    for one in sorted(candidates, key=lambda one: (-one.level, one.order)):
        if one.scheduler or one.level < 2:
            continue
        line = one.line
        if one.id in _REPORTED_LATE:
            earlier = True
        elif line.file == end.line.file:
            earlier = one.order < end.order
        elif line.time is not None and times:
            earlier = line.time < min(times)
        elif line.until is not None and times:
            earlier = line.until < min(times) or one.level == 3
        else:
            earlier = one.level == 3
        if earlier:
            return one
    return None


def _is_later(one: Sighting, end: Sighting) -> bool:
    """Return True if ``one`` is known to come after ``end``."""
    if one.line.file == end.line.file:
        return one.order > end.order
    if one.line.time is not None and end.line.time is not None:
        return one.line.time >= end.line.time
    return one.level < 2


def _evidence(best: Sighting, same: list[Sighting]) -> tuple[LogLine, ...]:
    """Return the line, the line before it of the same refusal, and lines with the same message."""
    others = sorted(
        (one for one in same if one is not best and not one.line.text.startswith(_OURS)),
        key=lambda one: one.order,
    )
    lead = [best.lead] if best.lead and best.launcher else []
    return (best.line, *lead, *(one.line for one in others))[:_MOST_EVIDENCE]


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _TEXT else f"{text[:_TEXT]} …"
