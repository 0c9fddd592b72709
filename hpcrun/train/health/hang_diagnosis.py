"""Find the ranks that cause a hang, from the ranks' answers: a pure function.

NCCL has a flight recorder, and in newer versions of torch gloo has one too.
``torchfrtrace FOLDER --prefix flight-nccl-rank-`` compares the files of all ranks.
"""

import contextlib
import math
import os
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

from hpcrun.run.endings import Hang
from hpcrun.train.parallel.process_group import group_names, trees
from hpcrun.train.position import CONNECTING, PREPARING, TRAINING, VALIDATING, Position

_NAMED_AT_MOST = 4


@dataclass(frozen=True)
class RankPosition:
    """Position of a rank at the alarm.

    ``idle``: seconds since its last progress. ``at``: the innermost line of its main thread outside torch.
    ``begun``: the latest collectives that it started in each of its process groups, by number, in order;
    empty before the first. ``broken``: the nodes that this rank's node cannot reach, and their addresses;
    None: not tried.
    """

    host: str
    step: int | None
    doing: str
    idle: float
    at: str
    begun: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)
    broken: Mapping[str, str] | None = None

    def as_record(self) -> dict[str, Any]:
        """Return plain data; ``RankPosition(**data)`` restores the object."""
        return asdict(self)


def judge_hang(
    answers: Mapping[int, RankPosition], hosts: Sequence[str | None], now: float, idle: float
) -> Hang:
    """Name the ranks for which the other ranks wait.

    A rank that does not answer is stopped, gone, or in code that blocks other threads. A rank that answers
    is behind if it has started the fewest steps, or the fewest collectives of a process group: the other
    ranks wait in the collective that it has not started. If a rank does not answer, the collectives may
    wait for that rank, so they say nothing about the others. If ranks have different collectives with the
    same number, they wait for each other, and no rank is behind.

    Args:
        now: in Unix seconds.
        idle: seconds without progress, on the rank that raised the alarm.
    """
    silent = [rank for rank in range(len(hosts)) if rank not in answers]
    late = [] if silent else _late(answers)
    # If every rank is behind in some group, they wait for each other.
    mutual = len(late) == len(answers) > 1
    crossed = _crossed(answers)
    behind = [] if mutual or crossed else late
    step = max((it.step for it in answers.values() if it.step is not None), default=None)
    words = [f"{_named(rank, hosts)} does not answer" for rank in silent]
    words += [f"{_named(rank, hosts)} is behind, {_place(answers[rank], step)}" for rank in behind]
    if crossed:
        words += _grouped(
            {r: f"came to {it} at {answers[r].at}" for r, it in crossed.items()}, hosts
        )
    elif mutual:
        words += _grouped({r: f"is {_place(it, step)}" for r, it in answers.items()}, hosts)
    elif not words:
        rank, first = min(answers.items())
        who = "it" if len(hosts) == 1 else f"all ranks are equally far, rank {rank}"
        words = [f"{who} is {_place(first, step)}"]
    hidden = len(words) - _NAMED_AT_MOST
    phrases = words[:_NAMED_AT_MOST] + ([f"and {hidden} more"] if hidden > 0 else [])
    if crossed or mutual:
        phrases.append(
            "these never meet; run the same collectives in the same order on every rank (fsdp: the same "
            "blocks, ddp: gradients of the same parameters)"
        )
    if any(it.doing == CONNECTING for it in answers.values()):
        phrases += _unconnected(answers.values())
    elif all(it.doing != TRAINING for it in answers.values()):
        phrases.append("if this work needs more time, raise train.hang_start")
    first_rank = next(iter([*silent, *behind]), 0 if len(hosts) == 1 else None)
    where = "before the first step" if step is None else f"in step {step}"
    return Hang(
        rank=first_rank,
        host=None if first_rank is None else hosts[first_rank],
        time=now,
        step=step,
        line=f"no progress for {idle:.0f} s {where}: {'; '.join(phrases)}",
    )


def _unconnected(answers: Collection[RankPosition]) -> list[str]:
    """Name a pair of nodes that cannot connect, and the node that most such pairs have; and the remedies."""
    tried = [it for it in answers if it.broken is not None]
    pairs = [(it.host, host, at) for it in tried for host, at in (it.broken or {}).items()]
    log = "set job.env.NCCL_DEBUG=INFO and look for the first WARN"
    if not pairs:
        by_tcp = ", but TCP connects the nodes" if tried else ""
        words = [f"NCCL cannot connect the GPUs{by_tcp}: {log}"]
    else:
        counts = Counter(host for one, other, _ in pairs for host in (one, other))
        worst, count = counts.most_common(1)[0]
        one, other, at = next(pair for pair in pairs if worst in pair[:2])
        words = [f"node {one} cannot connect to node {other} at {at}"]
        if len(pairs) > 1:
            words.append(f"{worst} is in {count} of {len(pairs)} such pairs")
        words.append(
            "check the firewall, name another network (job.interface), or exclude a node (job.exclude)"
        )
    return [*words, "if this start needs more time, raise train.connect_timeout"]


def _late(answers: Mapping[int, RankPosition]) -> list[int]:
    """Return the ranks that are last by steps, or else by the collectives of any group; may be empty.

    A rank that is late in one group because it waits in another group is excluded, unless all late ranks
    wait.
    """
    steps = {rank: -1 if it.step is None else it.step for rank, it in answers.items()}
    if len(set(steps.values())) > 1:
        return _last(steps)
    late: set[int] = set()
    waiting: set[int] = set()
    for group in {group for answer in answers.values() for group in answer.begun}:
        latest = {rank: it.begun[group] for rank, it in answers.items() if group in it.begun}
        begun = {rank: entries[-1][0] if entries else -1 for rank, entries in latest.items()}
        if len(set(begun.values())) > 1:
            late.update(_last(begun))
            waiting.update(begun.keys() - _last(begun))
    return sorted(late - waiting or late)


def _crossed(answers: Mapping[int, RankPosition]) -> dict[int, str]:
    """Return each rank's collective at the first number at which they differ; empty if they never do."""
    for group in sorted({group for answer in answers.values() for group in answer.begun}):
        begun = {rank: dict(it.begun.get(group, ())) for rank, it in answers.items()}
        for number in sorted({number for entries in begun.values() for number in entries}):
            found = {
                r: entries[number] for r, entries in sorted(begun.items()) if number in entries
            }
            if len(set(found.values())) > 1:
                return found
    return {}


def _grouped(phrases: Mapping[int, str], hosts: Sequence[str | None]) -> list[str]:
    """Merge equal phrases; a merged phrase names its first rank and the number of the rest."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(phrases):
        ranks.setdefault(phrases[rank], []).append(rank)
    return [
        f"{_named(same[0], hosts)}{f' and {len(same) - 1} more' if same[1:] else ''} {words}"
        for words, same in ranks.items()
    ]


def _last(reached: Mapping[int, int]) -> list[int]:
    least = min(reached.values())
    return sorted(rank for rank, number in reached.items() if number == least)


def _place(answer: RankPosition, newest: int | None) -> str:
    step = "" if answer.step in (None, newest) else f" step {answer.step}"
    return f"{answer.doing}{step} at {answer.at}"


def _named(rank: int, hosts: Sequence[str | None]) -> str:
    return f"rank {rank} on {hosts[rank]}" if hosts[rank] else f"rank {rank}"


_LATEST = 32
"""Number of a group's latest collectives to report: ranks that differ stop soon after."""

_SAME_SIZE = ("all_reduce", "allreduce", "all_gather", "reduce_scatter", "broadcast")

_DUMPS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}


def turn_on() -> None:
    """Turn on NCCL's recorder if torch leaves it off. Call before making any process group."""
    if not hasattr(c10d, _DUMPS["gloo"]):
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")


def dump(folder: Path, rank: int) -> dict[str, list[tuple[int, str]]]:
    """Write ``flight-nccl-rank-3`` etc.; return the latest collectives started in each group.

    The collectives are in order, such as ``{"gloo/0": [(43, "all_reduce of 144")]}``; the size is given if
    it must be the same on all ranks. A group in which this rank has started nothing has an empty list. An
    unreadable recorder is skipped, since the process is about to end.
    """
    begun: dict[str, dict[int, str]] = {}
    for kind, data in _recorded():
        begun.update({f"{kind}/{name}": {} for name in group_names()})
        # Safe to unpickle: this process itself has just made the data.
        entries = pickle.loads(data).get("entries", ())
        if entries:
            with contextlib.suppress(OSError):
                (folder / f"flight-{kind}-rank-{rank}").write_bytes(data)
        for entry in entries:
            # Groups inside a control tree have no name; the tree's own collectives show who waits.
            if not entry.get("is_p2p") and entry["process_group"][0]:
                group = begun.setdefault(f"{kind}/{entry['process_group'][0]}", {})
                group[int(entry["collective_seq_id"])] = _flight_recorder_named(entry)
    for tree in trees():
        begun[f"control/{tree.group_name}"] = dict(tree.begun())
    return {group: sorted(names.items())[-_LATEST:] for group, names in begun.items()}


def _flight_recorder_named(entry: dict[str, Any]) -> str:
    name = str(entry.get("profiling_name", "")).rpartition(":")[2].strip("_")
    # With several output tensors, the sizes may differ between ranks.
    sizes = entry.get("output_sizes") or []
    if name.removesuffix("_base") not in _SAME_SIZE or len(sizes) != 1:
        return name
    return f"{name} of {math.prod(sizes[0])}"


def _recorded() -> Iterator[tuple[str, bytes]]:
    for kind, name in _DUMPS.items():
        read: Any = getattr(c10d, name, None)
        data = None
        with contextlib.suppress(RuntimeError):
            data = read() if read is not None else None
        if data:
            yield kind, data


_PREPARES = 48
"""Multiple of ``hang_start`` for ``Task.prepare``, which may download for hours; a day by default."""

_TOGETHER = frozenset({TRAINING, VALIDATING})
"""Work in which a rank does nothing without the other ranks."""


@dataclass(frozen=True)
class StallLimits:
    """Maximum seconds without progress: in a step, other work, ``Task.prepare``, and NCCL's connection."""

    step: float
    other: float
    prepare: float
    connect: float

    @classmethod
    def of(
        cls, hang_after: float, hang_start: float, timeout: float, connect: float = math.inf
    ) -> "StallLimits":
        """Make the limits; a step gets at most half of the collectives' ``timeout``."""
        step = min(hang_after, timeout / 2)
        other = max(step, hang_start)
        return cls(step, other, max(other, _PREPARES * hang_start), min(connect, other))

    def allowed(self, position: Position) -> float:
        """Return the limit at ``position``; the first step may compile, so it has the limit of other work."""
        moving = position.step is not None and position.step > position.start
        return self.step if moving and position.doing == TRAINING else self.around(position.doing)

    def exceeded(self, idle: float, position: Position, awaited: Callable[[], bool]) -> bool:
        """Return True if a rank at ``position`` has made no progress for too long: ``idle`` seconds.

        A step also waits for a rank in work outside steps. ``awaited`` returns True during such work; it is
        asked beyond the limit only, because it asks the other ranks.
        """
        if idle < self.allowed(position):
            return False
        waits = awaited()
        return idle >= self.other or not waits

    def around(self, work: str) -> float:
        """Return the limit for ``work`` outside steps."""
        return {PREPARING: self.prepare, CONNECTING: self.connect}.get(work, self.other)

    @property
    def tick(self) -> float:
        """Seconds between two checks."""
        return min(5.0, self.step / 10)

    @property
    def answer(self) -> float:
        """Seconds that the ranks have to answer an alarm."""
        return min(10.0, max(0.2, self.step / 4))

    def survive(self, work: str) -> float:
        """Return the seconds that a rank in ``work`` may outlive a rank that has failed.

        In other work than steps, a rank may still commit a save that the failed rank has written.
        """
        return self.answer if work in _TOGETHER else 6 * self.answer

    def end(self, work: str) -> float:
        """Return the seconds after which a process without progress in ``work`` has ended in any case."""
        return self.around(work) + self.unheard + self.alarm

    @property
    def unheard(self) -> float:
        """Seconds beyond the limit after which the watchdog process considers the thread blocked."""
        return self.answer + 3 * self.tick

    @property
    def alarm(self) -> float:
        """Maximum seconds from an alarm to the end of the process."""
        return 4 * self.answer + 12 * self.tick
