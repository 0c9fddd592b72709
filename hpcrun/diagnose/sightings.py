"""The lines of a failed job that have a known message or an error, each with what is known about it."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hpcrun.diagnose.collectives import Positions
from hpcrun.diagnose.progress import Progress
from hpcrun.diagnose.read_log import LogLine
from hpcrun.diagnose.state_dict import OTHER_MODEL, WRAPPED, LoadedKeys
from hpcrun.run.failures.catalog import (
    KnownMessage,
    is_warning,
    match,
    named,
    of_traceback,
    phrases,
)

UNKNOWN = "unknown"
"""The id of a finding without a known cause: only the last line with an error is shown."""
SCHEDULER = "scheduler"
"""The kind of a message about an end that Slurm or a person began."""

_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(: .*)?$")
_FRAME = re.compile(r'\s+File ".+", line \d+')
# Python prints these tracebacks and continues.
_UNRAISED = ("Exception ignored in", "--- Logging error ---")
# The exception ends a thread; the program continues.
_THREAD = "Exception in thread "
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# Each expression of phrases.yaml for errors has one of them.
_ERROR_WORDS = ("error", "fatal", "exception", "interrupt", "critical", "what()", "check failed")
_MOST_SIGHTINGS = 20_000
_LONGEST = 4000
_DIGITS = str.maketrans("", "", "0123456789")
_ALIKE = 64
"""Lines that differ only in their digits: so many are searched one by one."""
_MOST_SHAPES = 50_000
_MOST_FRAMES = 400
"""Lines of a traceback."""
_KEPT_FRAMES = 2000
"""Characters at its end."""
# The policy of hpcrun requeues by itself.
_OWN_REQUEUE = re.compile(r"^hpcrun: (?:\S+: )?restart \d+ after ")
_REQUEUED = "slurm-requeued"
# Slurm starts the task in spite of many of these errors, or after some time.
_SOFT = ("slurm-task-plugin", "slurm-step-busy")
_LIBRARY_LINES = 1
_LOGGER_LINES = 3


@dataclass(frozen=True)
class Sighting:
    """A line with a known message, or with an unknown error.

    ``before``: steps, rows and lines of the log before the line. ``raised``: the line ends a traceback.
    ``quiet``: the line itself is only a warning. ``lead``: the first line of the same refusal.
    ``lines``: the number of later lines that show that the program continued; None: no number does.
    ``frames``: the last frames of the traceback that an unknown error ends.
    """

    line: LogLine
    entry: KnownMessage | None
    order: int
    before: tuple[int, int, int]
    raised: bool
    quiet: bool = False
    unknown: bool = False
    lead: LogLine | None = None
    lines: int | None = None
    frames: str = ""

    @property
    def level(self) -> int:
        """The strength of the line as a cause."""
        level = self.entry.level if self.entry else 2
        return min(level, 1) if self.quiet else level

    @property
    def id(self) -> str:
        """The id of the entry, or what the line is without one."""
        return self.entry.id if self.entry else UNKNOWN if self.unknown else "exception"

    @property
    def scheduler(self) -> bool:
        """True for an end that Slurm or a person began."""
        return self.entry is not None and self.entry.kind == SCHEDULER

    @property
    def launcher(self) -> bool:
        """True for a line of a launcher, which the output of ranks may overtake."""
        return self.scheduler or self.id.startswith(("slurm-", "step-", "task-"))


@dataclass(frozen=True)
class _Kind:
    """What a text is, whatever its place. ``lines``: the later lines after which a program has continued."""

    entry: KnownMessage | None
    known: bool
    handled: bool
    warning: bool
    error: bool
    refusal: str
    lines: int | None
    output: bool


def _kind_of(text: str) -> _Kind:
    head = text[:_LONGEST]
    entry = match(head)
    error = entry is None and _is_error(head[:400])
    known = error or entry is not None
    refusal = phrases("refusal").match(text)
    output = (
        not (entry or error) and bool(text.strip()) and not phrases("advice").search(head[:400])
    )
    lines, handled, warning = None, False, False
    if not output:
        handled = known and bool(phrases("handled").search(text))
        warning = is_warning(text)
        soft = entry is not None and entry.id in _SOFT
        handled = handled and not soft
        soft = soft or (error and text.startswith(("srun: error: ", "slurmstepd")))
        if soft or phrases("library").search(head[:200]):
            lines = _LIBRARY_LINES
        elif phrases("logger").search(head[:120]):
            lines = _LOGGER_LINES
    return _Kind(
        entry, known, handled, warning, error, refusal[1] if refusal else "", lines, output
    )


def _is_error(text: str) -> bool:
    low = text.lower()
    return any(word in low for word in _ERROR_WORDS) and bool(phrases("error").search(text))


class _Kinds:
    """The kinds of texts. Many lines that differ only in their digits are searched only some times."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, _Kind]] = {}

    def of(self, text: str) -> _Kind:
        """Return the kind of ``text``."""
        shape = text[:_LONGEST].translate(_DIGITS)
        count, kind = self._known.get(shape, (0, None))
        if kind is None or count < _ALIKE:
            kind = _kind_of(text)
            if count or len(self._known) < _MOST_SHAPES:
                self._known[shape] = count + 1, kind
        return kind


_Key = tuple[str, int | None, str | None, str]


def _key(one: Sighting) -> _Key:
    return one.id, one.line.rank, one.line.node, one.line.file


class Sightings:
    """Known messages found so far, up to a maximum number."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ranks: set[int] = set()
        self.nodes: dict[int, str] = {}
        self.named_nodes: set[str] = set()
        self.positions = Positions()
        self.wrapper = ""
        self._first: dict[_Key, Sighting] = {}
        self._last: dict[_Key, Sighting] = {}
        # For each source, the label before its traceback, and whether Python continues after it.
        self._tracebacks: dict[tuple[str, int | None], tuple[str, str]] = {}
        self._ways: dict[tuple[str, int | None], str] = {}
        self._frames: dict[tuple[str, int | None], list[str]] = {}
        self._kinds = _Kinds()
        self._unknown: Sighting | None = None
        self._refusal: tuple[str, int, LogLine] | None = None
        self._progress: dict[str, Progress] = {}
        self._keys: dict[tuple[str, int | None], LoadedKeys] = {}
        self._order = 0
        self._requeues = False

    def all(self) -> Iterable[Sighting]:
        """Return the first sighting of each message, rank, node and file."""
        return self._first.values()

    def alive(self) -> list[Sighting]:
        """Return the sightings after which the program did not continue, in order."""
        found = [one for one in self._first.values() if not self._handled(one)]
        return sorted(found, key=lambda one: one.order)

    def unknown(self) -> Sighting | None:
        """Return the last line with an error that no entry knows, if the program did not continue."""
        return self._unknown if self._unknown and not self._handled(self._unknown) else None

    def add(self, line: LogLine) -> None:
        """Read a line."""
        self._order += 1
        if line.rank is not None:
            self.ranks.add(line.rank)
            if line.node:
                self.nodes.setdefault(line.rank, line.node)
        if line.node and len(self.named_nodes) < _MOST_SIGHTINGS:
            self.named_nodes.add(line.node)
        progress = self._progress.setdefault(line.file, Progress())
        progress.add(line.text, self._order)
        if line.text.startswith("hpcrun: ") and _OWN_REQUEUE.match(line.text):
            self._requeues = True
        ended = self._follow_traceback(line)
        kind = self._kinds.of(line.text)
        raised = ended == "raised"
        certain = raised or line.failure
        lead = self._lead(line, kind)
        if ended == "ignored" or not (certain or kind.known):
            if kind.output and not ended and not self._in_traceback(line):
                progress.output += 1
            return
        if not certain and kind.handled:
            return
        entry, frames = kind.entry, ""
        # A line of source may have the words of a message that was not raised.
        source = ended == "source"
        if (entry is not None and not source) or raised:
            frames = self._frames_of(line)
            entry = of_traceback(entry, frames)
        quiet = not certain and kind.warning
        lines = _LIBRARY_LINES if ended == "thread" else None if certain else kind.lines
        sighting = Sighting(
            line, entry, self._order, progress.now(), raised, lead=lead, lines=lines
        )
        if entry is not None:
            if entry.id == OTHER_MODEL:
                self._keys.setdefault((line.file, line.rank), LoadedKeys()).add(line.text)
            self._keep(replace(sighting, quiet=(quiet or source) and entry.level > 0))
            if "ank " in line.text:
                self.positions.add(line.text, line.rank)
        elif certain:
            self._keep(replace(sighting, frames=frames[-_KEPT_FRAMES:]))
        elif not quiet and kind.error:
            progress.failed = self._order
            self._unknown = replace(sighting, unknown=True)
            if lead is not None:
                self._unknown = replace(self._unknown, line=lead, lead=None)
        elif kind.output and not self._in_traceback(line):
            progress.output += 1

    def _lead(self, line: LogLine, kind: _Kind) -> LogLine | None:
        """Return the first of consecutive error lines of one program of Slurm, if ``line`` is a later one."""
        before, self._refusal = self._refusal, None
        if not kind.refusal:
            return None
        if before and before[0] == kind.refusal and before[1] == self._order - 1:
            self._refusal = kind.refusal, self._order, before[2]
            return before[2]
        self._refusal = kind.refusal, self._order, line
        return None

    def _frames_of(self, line: LogLine) -> str:
        """Return the lines of the traceback that ``line`` ends, or the traceback of a record."""
        if line.frames:
            return line.frames
        return "\n".join(self._frames.pop((line.file, line.rank), ()))

    def _in_traceback(self, line: LogLine) -> bool:
        return (line.file, line.rank) in self._tracebacks

    def _follow_traceback(self, line: LogLine) -> str:
        """Return "raised", "thread" or "ignored" for the end of a traceback, "source" for source; else ""."""
        source, text = (line.file, line.rank), line.text
        opened = self._tracebacks.get(source)
        if text.startswith(_UNRAISED):
            self._tracebacks[source] = "", "ignored"
        elif text.startswith(_THREAD):
            self._tracebacks[source] = "", "thread"
        elif _TRACEBACK in text:
            label = text.partition(_TRACEBACK)[0].removesuffix("Original ")
            self._frames[source] = []
            self._tracebacks[source] = label, opened[1] if opened else "raised"
        elif text.startswith(_CHAINED) and source in self._ways:
            self._tracebacks[source] = "", self._ways[source]
        elif opened:
            label, way = opened
            text = text[len(label) :]
            # The label before a line may be a time.
            same = re.sub(r"\d", "0", line.text[: len(label)]) == re.sub(r"\d", "0", label)
            if same and text.strip() and not text[0].isspace():
                del self._tracebacks[source]
                self._ways[source] = way
                if _EXCEPTION.match(text):
                    return way
            elif len(frames := self._frames.setdefault(source, [])) < _MOST_FRAMES:
                frames.append(text)
                return "source" if len(frames) > 1 and _FRAME.match(frames[-2]) else ""
        return ""

    def _keep(self, sighting: Sighting) -> None:
        if sighting.id == _REQUEUED and self._requeues:
            return
        self.counts[sighting.id] += 1
        line = sighting.line
        if not sighting.quiet:
            self._progress[line.file].failed = sighting.order
        key = _key(sighting)
        known = self._first.get(key)
        if known is not None:
            self._last[key] = sighting
        if known is None and len(self._first) >= _MOST_SIGHTINGS:
            return
        if known is None or known.quiet > sighting.quiet or self._handled(known):
            self._first[key] = sighting

    def _handled(self, one: Sighting) -> bool:
        """Return True if the program continued after the message."""
        if one.line.failure:
            return False
        hard = one.launcher or (one.raised and one.level > 1)
        progress = self._progress[one.line.file]
        if progress.continued(one.order, one.before, steps=not hard, lines=None):
            return True
        # The newest of equal messages: the earlier ones are no failure of another kind.
        last = self._last.get(_key(one), one)
        if last.lines is None or last.raised or (hard and one.id not in _SOFT):
            return False
        return progress.continued(last.order, last.before, steps=False, lines=last.lines)

    def name_wrappers(self) -> None:
        """Let the keys of a checkpoint decide between another model and a wrapper."""
        wrappers = {source: keys.wrapper() for source, keys in self._keys.items()}
        if not wrappers or not all(wrappers.values()):
            return
        self._first = {
            key: replace(one, entry=named(WRAPPED)) if one.id == OTHER_MODEL else one
            for key, one in self._first.items()
        }
        self.counts[WRAPPED] += self.counts.pop(OTHER_MODEL, 0)
        self.wrapper = next(filter(None, wrappers.values()), "")
