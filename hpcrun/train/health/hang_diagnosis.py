"""Which rank to look at when none makes progress: a pure judgement of what each one answers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcrun.run.endings import Hang
from hpcrun.train.phase import TRAINING

_NAMED_AT_MOST = 4


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself when the alarm is raised.

    ``idle``: seconds since it last moved. ``at``: the innermost line of its main thread outside torch.
    ``begun``: the latest collectives that it has begun in each process group of its own, by number, in
    order; empty before the first.
    """

    host: str
    step: int | None
    doing: str
    idle: float
    at: str
    begun: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """Plain data, from which ``Answer(**data)`` is made again."""
        return asdict(self)


def judge_hang(
    answers: Mapping[int, Answer], hosts: Sequence[str | None], now: float, idle: float
) -> Hang:
    """Name the ranks that the others wait for.

    A rank that does not answer is silent: stopped, gone, or in code that lets no other thread run. One
    that answers is behind if it has begun the fewest steps, or the fewest collectives of a process group:
    the others wait in the one that it has not begun. Where a rank is silent, those collectives may wait
    for it, and say nothing of the others. Ranks whose collectives of one number differ wait for each other
    whoever is behind.

    Args:
        answers: by rank, of those that answered; at least one.
        hosts: of every rank, None where it is not known.
        now: in Unix seconds.
        idle: seconds without progress, on the rank that raised the alarm.
    """
    silent = [rank for rank in range(len(hosts)) if rank not in answers]
    late = [] if silent else _late(answers)
    # Each late in another group: they wait for each other, and none of them alone is at fault.
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
    told = words[:_NAMED_AT_MOST] + ([f"and {hidden} more"] if hidden > 0 else [])
    if crossed or mutual:
        told.append(
            "these never meet; all ranks need the same collectives in the same order (fsdp: the same blocks, "
            "ddp: gradients of the same parameters)"
        )
    if all(it.doing != TRAINING for it in answers.values()):
        told.append("what rightly takes longer needs a longer train.hang_start")
    first_rank = next(iter([*silent, *_minority(crossed), *behind]), 0 if len(hosts) == 1 else None)
    where = "before the first step" if step is None else f"in step {step}"
    return Hang(
        rank=first_rank,
        host=None if first_rank is None else hosts[first_rank],
        time=now,
        step=step,
        line=f"no progress for {idle:.0f} s {where}: {'; '.join(told)}",
    )


def _late(answers: Mapping[int, Answer]) -> list[int]:
    """The ranks furthest back by steps, or else by the collectives of any group; none where nobody is.

    One that is late in a group while it waits in another for somebody is left out, unless all are so.
    """
    steps = {rank: -1 if it.step is None else it.step for rank, it in answers.items()}
    if len(set(steps.values())) > 1:
        return _last(steps)
    late: set[int] = set()
    waiting: set[int] = set()
    for group in {group for answer in answers.values() for group in answer.begun}:
        told = {rank: it.begun[group] for rank, it in answers.items() if group in it.begun}
        begun = {rank: latest[-1][0] if latest else -1 for rank, latest in told.items()}
        if len(set(begun.values())) > 1:
            late.update(_last(begun))
            waiting.update(begun.keys() - _last(begun))
    return sorted(late - waiting or late)


def _crossed(answers: Mapping[int, Answer]) -> dict[int, str]:
    """What each rank began at the first place where that differs; nothing where it never does."""
    for group in sorted({group for answer in answers.values() for group in answer.begun}):
        begun = {rank: dict(it.begun.get(group, ())) for rank, it in answers.items()}
        for number in sorted({number for told in begun.values() for number in told}):
            found = {rank: told[number] for rank, told in sorted(begun.items()) if number in told}
            if len(set(found.values())) > 1:
                return found
    return {}


def _minority(crossed: Mapping[int, str]) -> list[int]:
    """Those who went a way of their own, where the others are more."""
    ways = Counter(crossed.values()).most_common()
    if len(ways) < 2 or ways[-1][1] == ways[0][1]:
        return []
    return [rank for rank, way in crossed.items() if way == ways[-1][0]]


def _grouped(told: Mapping[int, str], hosts: Sequence[str | None]) -> list[str]:
    """A phrase for all ranks of which the same is told, by the first of them."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(told):
        ranks.setdefault(told[rank], []).append(rank)
    return [
        f"{_named(alike[0], hosts)}{f' and {len(alike) - 1} more' if alike[1:] else ''} {words}"
        for words, alike in ranks.items()
    ]


def _last(reached: Mapping[int, int]) -> list[int]:
    least = min(reached.values())
    return sorted(rank for rank, number in reached.items() if number == least)


def _place(answer: Answer, newest: int | None) -> str:
    step = "" if answer.step in (None, newest) else f" step {answer.step}"
    return f"{answer.doing}{step} at {answer.at}"


def _named(rank: int, hosts: Sequence[str | None]) -> str:
    return f"rank {rank} on {hosts[rank]}" if hosts[rank] else f"rank {rank}"
