"""The probes of `hpcrun preflight` and `hpcrun netcheck`: their records, their list, and their findings.

A probe is a function that runs on every node and yields what it found there. The modules `node_probes` and
`gpu_probes` contain the probes.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "unknown"]

SLOWER = 1.25
"""A time above this multiple of the best time is slow: the first products of a job vary by more than 10 %."""


@dataclass(frozen=True)
class Needs:
    """The part of a job that its nodes have to serve.

    ``gpus``: GPUs per node; 0: none; None: any number. ``run``: the run directory, if there is a run.
    ``hosts``: the names of the nodes; empty for processes of one machine. ``interface``: ``job.interface``.
    """

    gpus: int | None = None
    run: str | None = None
    hosts: Sequence[str] = ()
    interface: str | None = None


@dataclass(frozen=True)
class Answer:
    """A statement about the node. ``unknown``: a fact cannot be read, which does not stop a job.

    ``everywhere``: the status if every node makes a statement with this status.
    """

    status: Status
    words: str
    remedy: str = ""
    everywhere: Status | None = None


@dataclass(frozen=True)
class Same:
    """A value that should be the same on all nodes; ``status``: of a node that differs.

    ``of``: the device with this value. ``check``: the check that reports the value, if not the probe's own.
    """

    what: str
    value: str
    remedy: str
    status: Status = "fail"
    of: str = ""
    check: str = ""


@dataclass(frozen=True)
class Timed:
    """A time that should be about the same for all devices of one kind."""

    kind: str
    seconds: float
    remedy: str
    of: str = ""


Record = Answer | Same | Timed
Records = Iterator[Record]
Found = Mapping[str, Sequence[tuple[str, Record]]]
"""For each node, what its probes yielded, with the name of each probe."""


@dataclass(frozen=True)
class Probe:
    """A check of every node. ``function``: runs there. ``seconds``: its limit.

    ``hardware``: a failure concerns the node even if the job has no other node to compare.
    ``netcheck``: `hpcrun netcheck` runs the probe too.
    """

    name: str
    function: Callable[[Needs], Records]
    seconds: float = 60.0
    hardware: bool = False
    netcheck: bool = False


_PROBES: dict[str, Probe] = {}


def probes() -> Mapping[str, Probe]:
    """Return all probes by name; their modules add them to the list."""
    importlib.import_module("hpcrun.network.gpu_probes")
    importlib.import_module("hpcrun.network.node_probes")
    return _PROBES


def probe(name: str, **options: Any) -> Callable[[Callable[[Needs], Records]], Any]:
    """Add a function to the probes, with the ``options`` of :class:`Probe`."""

    def add(function: Callable[[Needs], Records]) -> Callable[[Needs], Records]:
        _PROBES[name] = Probe(name, function, **options)
        return function

    return add


def record_from(data: Mapping[str, Any]) -> Record:
    """Return the record from the result of ``asdict``."""
    kind = Timed if "seconds" in data else Same if "value" in data else Answer
    return kind(**data)


@dataclass(frozen=True)
class Finding:
    """A result: about one node, the two ends of a link, or about all nodes if ``nodes`` is empty."""

    check: str
    nodes: tuple[str, ...]
    status: Status
    words: str
    remedy: str = ""

    @property
    def text(self) -> str:
        """The fault and the remedy in one line."""
        return f"{self.words}; {self.remedy}" if self.remedy else self.words

    def as_record(self) -> dict[str, Any]:
        """Return the finding as one flat JSON object."""
        return asdict(self) | {"nodes": list(self.nodes)}


def findings_of(found: Found) -> list[Finding]:
    """Return the findings of all nodes: their statements, and the values that differ."""
    listed = [(node, check, one) for node, told in found.items() for check, one in told]
    return [*_statements(listed, len(found)), *_differences(listed), *_slow_devices(listed)]


Listed = Sequence[tuple[str, str, Record]]


def _statements(listed: Listed, count: int) -> Iterable[Finding]:
    told = [(node, check, one) for node, check, one in listed if isinstance(one, Answer)]
    for node, check, one in told:
        nodes = {name for name, of, other in told if (of, other.status) == (check, one.status)}
        everywhere = one.everywhere is not None and len(nodes) == count
        status = one.everywhere if everywhere and one.everywhere else one.status
        yield Finding(check, (node,), status, one.words, one.remedy)


def _differences(listed: Listed) -> Iterable[Finding]:
    """Yield a finding for each value that differs from most, or a single one without a majority."""
    groups: dict[tuple[str, str], list[tuple[str, Same]]] = {}
    for node, check, one in listed:
        if isinstance(one, Same):
            groups.setdefault((one.check or check, one.what), []).append((node, one))
    nodes = {node for node, _, _ in listed}
    equal: dict[str, list[str]] = {}
    for (check, what), seen in groups.items():
        usual, count = Counter(one.value for _, one in seen).most_common(1)[0]
        status, remedy = seen[0][1].status, seen[0][1].remedy
        if count == len(seen):
            on_all = {node for node, _ in seen} == nodes
            equal.setdefault(check, []).extend([f"{what} {usual}"] if on_all else [])
        elif count * 2 <= len(seen):
            values = ", ".join(f"{node} has {one.value}" for node, one in seen[:4])
            yield Finding(check, (), status, f"{what} differs: {values}", remedy)
        else:
            for node, one in seen:
                if one.value != usual:
                    of = f"{one.of}: " if one.of else ""
                    words = f"{of}{what} is {one.value}, on most nodes {usual}"
                    yield Finding(check, (node,), status, words, remedy)
    for check, values_of in equal.items():
        if values_of:
            yield Finding(check, (), "pass", f"equal: {', '.join(values_of)}")


def _slow_devices(listed: Listed) -> Iterable[Finding]:
    times = [(node, check, one) for node, check, one in listed if isinstance(one, Timed)]
    best: dict[str, float] = {}
    for _, _, one in times:
        best[one.kind] = min(one.seconds, best.get(one.kind, one.seconds))
    for node, check, one in times:
        share = one.seconds / best[one.kind]
        if share > SLOWER:
            words = f"{one.of} takes {share:.2f} times as long as the best {one.kind}"
            yield Finding(check, (node,), "warn", words, one.remedy)


_ORDER: Sequence[Status] = ("fail", "warn", "unknown", "pass")


def lines(found: Sequence[Finding]) -> list[str]:
    """Return the report: a line for each check that passes everywhere, and for each other finding."""
    checks = list(dict.fromkeys(one.check for one in found))
    width = max(map(len, checks), default=0)
    text: list[str] = []
    for check in checks:
        of_check = [one for one in found if one.check == check]
        bad = [one for one in of_check if one.status != "pass"]
        for one in sorted(bad, key=lambda one: _ORDER.index(one.status)):
            where = " - ".join(one.nodes) or "all nodes"
            text.append(f"{one.status:<7}  {check:<{width}}  {where}: {one.text}")
        if not bad:
            # The numbers of other nodes differ slightly: the first node is the example.
            first = [one for one in of_check if one.nodes in (of_check[0].nodes, ())]
            shown = dict.fromkeys(one.words for one in first)
            text += [f"{'pass':<7}  {check:<{width}}  {words}" for words in shown]
    return text
