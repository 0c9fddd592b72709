"""Find slow nodes: a rank whose own work in a step takes longer than that of the other nodes' ranks.

A step takes equally long on all ranks, because all wait for the slowest. So each rank measures its own work:
the wait for data and the forward pass, without the waits for other ranks (``Stopwatch``). Rank 0 has these
times at every logged step and compares them here, without a further collective.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcrun.printing import say_aside
from hpcrun.ranks.signals import StopReason
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import Slow, SlowOver
from hpcrun.run.journal.journal import Journal
from hpcrun.run.slow_nodes import SlowNode, replaced_hosts

_FACTOR = 1.2
_LEAST = 0.005
"""Seconds: in small steps, shorter delays are noise."""
_TINY = 1e-6
_WEIGHT = 0.05
"""Share of a step: a shorter delay costs less than a restart. A forward pass is a third of a step's work."""
_LINES, _STEPS = 5, 50
"""Size of a window: at least so many logged lines, and so many steps."""
_WINDOWS = 3
"""Windows in a row that agree before a node becomes slow, or is no longer slow."""
_WARM = 10
"""First steps of an attempt, which compile, connect and fill caches."""


def slow_hosts(
    hosts: Sequence[str], own: Sequence[float], step: float
) -> dict[str, tuple[int, float]]:
    """Return the hosts that are slower than the others, each with its slowest rank and the ratio.

    The slowest rank of a host counts, since its GPUs may be slow alone or together. With one host, its
    ranks are compared.

    Args:
        hosts: the host of every rank.
        own: seconds of each rank's own work in a step.
        step: seconds of a whole step; the delay must be a noticeable part of it.
    """
    single = len(set(hosts)) == 1
    slowest: dict[object, int] = {}
    for rank, host in enumerate(hosts):
        key: object = rank if single else host
        if key not in slowest or own[rank] > own[slowest[key]]:
            slowest[key] = rank
    found: dict[str, tuple[int, float]] = {}
    for rank in sorted(slowest.values(), key=own.__getitem__):
        others = [own[other] for other in slowest.values() if other != rank]
        if not others:
            continue
        usual = statistics.median(others)
        late = own[rank] - usual
        if own[rank] > _FACTOR * usual and late > max(_LEAST, _WEIGHT * step):
            # Of one host, the slowest rank comes last.
            found[hosts[rank]] = rank, own[rank] / max(usual, _TINY)
    return found


@dataclass
class _State:
    """A host: whether it is slow, and its ratios in the newest windows, all of which contradict this."""

    slow: bool = False
    against: list[float] = field(default_factory=list)


class SlowNodes:
    """Decides from the logged lines which hosts are slow.

    A window has the lines of 50 steps or more, and at least five lines; of each rank it takes the median.
    Three windows in a row make a host slow, and three windows without it end that. So an outlier, a slow
    save or another user's short job names no host.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        """``hosts``: the host of every rank."""
        self.hosts = hosts
        self._states = {host: _State() for host in hosts}
        self._lines: list[tuple[Sequence[float], float]] = []
        self._steps = self._seen = 0

    def add(
        self, done: int, steps: int, own: Sequence[float], step: float
    ) -> tuple[list[SlowNode], list[str]]:
        """Add a logged line; return the nodes that have become slow, and the hosts that no longer are.

        Args:
            done: finished steps.
            steps: the steps of this line.
            own: seconds of each rank's own work in a step.
            step: seconds of a whole step.
        """
        warm = self._seen < _WARM
        self._seen += steps
        if len(own) < 2 or warm:
            return [], []
        self._lines.append((own, step))
        self._steps += steps
        if len(self._lines) < _LINES or self._steps < _STEPS:
            return [], []
        medians = [
            statistics.median(times) for times in zip(*(own for own, _ in self._lines), strict=True)
        ]
        found = slow_hosts(self.hosts, medians, statistics.median(step for _, step in self._lines))
        self._lines, self._steps = [], 0
        begun, over = [], []
        for host, state in self._states.items():
            rank, ratio = found.get(host, (0, 1.0))
            against = [] if (host in found) == state.slow else [*state.against, ratio]
            state.against = against
            if len(against) < _WINDOWS:
                continue
            state.slow, state.against = not state.slow, []
            if state.slow:
                begun.append(SlowNode(host, rank, round(statistics.median(against), 2), done))
            else:
                over.append(host)
        return begun, over


# Slow nodes that a run leaves at most.
_MOST = 3


class SlowNodeWatch:
    """Records slow nodes in the event log, and asks for a stop if they are to be replaced; on rank 0.

    ``leaving``: the hosts to be replaced. A host is left only once: a restart on the same node, or a task
    that gives its ranks unequal work, must not stop the run again and again.
    """

    def __init__(
        self, run: RunDirectory, attempt: Attempt, hosts: Sequence[str], *, replace: bool
    ) -> None:
        """``hosts``: the host of every rank. ``replace``: ``restarts.replace_slow``."""
        self._run, self._attempt, self._replace = run, attempt, replace
        self._nodes = SlowNodes(hosts)
        self.hosts = hosts
        self.leaving: list[str] = []

    def add(self, done: int, steps: int, own: Sequence[float], step: float) -> None:
        """Add a logged line, as :meth:`SlowNodes.add`; record and print what changes."""
        begun, over = self._nodes.add(done, steps, own, step)
        for one in begun:
            say_aside(f"hpcrun: {one.line}")
            slow = Slow(
                attempt=self._attempt,
                step=one.since,
                host=one.host,
                rank=one.rank,
                ratio=one.ratio,
            )
            Journal(self._run).note(slow)
        for host in over:
            say_aside(f"hpcrun: {host} is no longer slow, since step {done}")
            Journal(self._run).note(SlowOver(attempt=self._attempt, step=done, host=host))
        if begun and self._replace:
            try:
                known = replaced_hosts(Journal(self._run).read())
            except OSError as error:
                say_aside(f"hpcrun: no slow node is replaced: {error}")
                return
            # Work that is unequal by itself would follow the ranks from node to node.
            if len(known) < _MOST:
                self.leaving += [one.host for one in begun if one.host not in known]

    @property
    def reason(self) -> StopReason:
        """SLOW_NODE if a node is to be replaced at the next save, else NONE."""
        return StopReason.SLOW_NODE if self.leaving else StopReason.NONE
