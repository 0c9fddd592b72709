"""Which rank to look at when none makes progress: a pure judgement of what each one answers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcrun.run.endings import Hang

_NAMED_AT_MOST = 4


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself when the alarm is raised.

    ``idle``: seconds since it last moved. ``at``: the innermost line of its main thread outside torch.
    ``begun``: the last collective that it has begun in each process group, by number.
    """

    host: str
    step: int | None
    doing: str
    idle: float
    at: str
    begun: Mapping[str, int] = field(default_factory=dict)

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
    for it, and say nothing of the others.

    Args:
        answers: by rank, of those that answered; at least one.
        hosts: of every rank, None where it is not known.
        now: in Unix seconds.
        idle: seconds without progress, on the rank that raised the alarm.
    """
    silent = [rank for rank in range(len(hosts)) if rank not in answers]
    behind = [] if silent else _behind(answers)
    step = max((it.step for it in answers.values() if it.step is not None), default=None)
    words = [f"{_named(rank, hosts)} does not answer" for rank in silent]
    words += [f"{_named(rank, hosts)} is behind, {_place(answers[rank], step)}" for rank in behind]
    if not words:
        rank, first = min(answers.items())
        who = "it" if len(hosts) == 1 else f"all ranks are equally far, rank {rank}"
        words = [f"{who} is {_place(first, step)}"]
    hidden = len(words) - _NAMED_AT_MOST
    told = words[:_NAMED_AT_MOST] + ([f"and {hidden} more"] if hidden > 0 else [])
    first_rank = next(iter([*silent, *behind]), 0 if len(hosts) == 1 else None)
    where = "before the first step" if step is None else f"in step {step}"
    return Hang(
        rank=first_rank,
        host=None if first_rank is None else hosts[first_rank],
        time=now,
        step=step,
        line=f"no progress for {idle:.0f} s {where}: {'; '.join(told)}",
    )


def _behind(answers: Mapping[int, Answer]) -> list[int]:
    """The ranks furthest back; none where that are all."""
    steps = {rank: -1 if it.step is None else it.step for rank, it in answers.items()}
    if len(set(steps.values())) > 1:
        return _last(steps)
    late: set[int] = set()
    for group in {group for answer in answers.values() for group in answer.begun}:
        begun = {rank: it.begun[group] for rank, it in answers.items() if group in it.begun}
        if len(set(begun.values())) > 1:
            late.update(_last(begun))
    # Each behind in another group: they wait for each other, and none of them alone is at fault.
    return sorted(late) if len(late) < len(answers) else []


def _last(reached: Mapping[int, int]) -> list[int]:
    least = min(reached.values())
    return sorted(rank for rank, number in reached.items() if number == least)


def _place(answer: Answer, newest: int | None) -> str:
    step = "" if answer.step in (None, newest) else f" step {answer.step}"
    return f"{answer.doing}{step} at {answer.at}"


def _named(rank: int, hosts: Sequence[str | None]) -> str:
    return f"rank {rank} on {hosts[rank]}" if hosts[rank] else f"rank {rank}"
