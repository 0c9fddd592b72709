"""The stacks of a job's ranks: equal stacks grouped, and the rank for which the others wait."""

import re
import sys
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hpcrun.run.endings import is_own_code, is_package_code, original
from hpcrun.run.stacks import Frame, Stack, Thread

MOVED = 3.0
"""Seconds: a rank moves if its position changed more recently than this. Ranks check it once a second."""
_NAMED, _PLACES = 8, 4
_WAITS = {
    "/torch/distributed/": "in a collective",
    "/torch/utils/data/": "in the data loader",
    "/hpcrun/train/data/": "in the data loader",
}
_COLLECTIVE = f" ({_WAITS['/torch/distributed/']})"
_INSTALLED = re.compile(r".*/(site|dist)-packages/")


@dataclass(frozen=True)
class StackGroup:
    """Processes with equal stacks. ``threads``: the equal stacks, with the original paths of the files."""

    stacks: tuple[Stack, ...]
    threads: tuple[Thread, ...]

    @property
    def place(self) -> str:
        """The innermost line of the main thread in code of the user, or else the innermost line."""
        frames = self.threads[0].frames if self.threads else ()
        own = [frame for frame in frames if is_own_code(frame.file)] or list(frames)
        return _line(own[-1]) if own else "an unknown place"

    @property
    def waits(self) -> str:
        """Reason of the wait in the innermost code of a library, in parentheses; empty if it is unknown."""
        for frame in reversed(self.threads[0].frames if self.threads else ()):
            for part, words in _WAITS.items():
                if part in frame.file:
                    return f" ({words})"
            if is_own_code(frame.file):
                break
        return ""


def folded(stacks: Iterable[Stack], *, all_threads: bool = False) -> list[StackGroup]:
    """Return the groups of processes with equal stacks, the largest first, then by rank.

    Args:
        all_threads: compare and keep all threads, not only the main thread.
    """
    groups: dict[Hashable, list[Stack]] = {}
    shown: dict[Hashable, tuple[Thread, ...]] = {}
    names: dict[str, str] = {}
    for stack in sorted(stacks, key=_rank):
        threads = stack.threads if all_threads else stack.threads[:1]
        originals = tuple(_with_originals(thread, names) for thread in threads)
        # py-spy does not always find the name of a thread, and faulthandler has none.
        main, *others = [thread.frames for thread in originals] or [()]
        key = (main, tuple(sorted(others, key=str)))
        groups.setdefault(key, []).append(stack)
        shown.setdefault(key, originals)
    found = [StackGroup(tuple(members), shown[key]) for key, members in groups.items()]
    return sorted(found, key=lambda group: (-len(group.stacks), _rank(group.stacks[0])))


def summary(groups: Sequence[StackGroup], unread: Sequence[int] = ()) -> str:
    """Return a line with the rank that is behind, or that no rank is behind.

    Args:
        unread: the tasks without stacks.
    """
    stacks = [stack for group in groups for stack in group.stacks if stack.rank is not None]
    line = _comparison(groups, stacks) if stacks else "no rank could be read"
    return f"{line}; not read: {ranges(sorted(unread), 'task')}" if unread else line


def _comparison(groups: Sequence[StackGroup], stacks: Sequence[Stack]) -> str:
    groups = [group for group in groups if any(one.rank is not None for one in group.stacks)]
    steps = sorted({stack.step for stack in stacks if stack.step is not None})
    if any(stack.idle is not None and stack.idle < MOVED for stack in stacks):
        return f"the ranks move: {_steps(steps)}"
    if len(steps) > 1:
        late = [stack for stack in stacks if stack.step == steps[0]]
        place = next(group.place for group in groups if late[0] in group.stacks)
        idle = min(stack.idle or 0.0 for stack in stacks)
        return (
            f"{ranks_of(late)} {_is(late)} behind: step {steps[0]}, the newest is {steps[-1]}; "
            f"at {place}; no rank has moved for {idle:.0f} s"
        )
    if len(groups) == 1:
        return f"{ranks_of(stacks)} {_is(stacks)} at the same place: {groups[0].place}"
    largest, *_, smallest = groups
    if len(groups) == 2 and len(smallest.stacks) < len(largest.stacks):
        return (
            f"{ranks_of(smallest.stacks)} {_is(smallest.stacks)} elsewhere: at {smallest.place}, "
            f"the others at {largest.place}"
        )
    # Those in a collective wait for the others.
    outside = [group for group in groups if group.waits != _COLLECTIVE]
    if len(outside) == 1:
        (odd,) = outside
        waiting = next(group for group in groups if group is not odd)
        return (
            f"{ranks_of(odd.stacks)} {_is(odd.stacks)} elsewhere: at {odd.place}{odd.waits}, "
            f"the others at {waiting.place}{waiting.waits}"
        )
    named = [
        f"{ranks_of(group.stacks)} at {group.place}{group.waits}" for group in groups[:_PLACES]
    ]
    more = "; …" if len(groups) > _PLACES else ""
    return f"the ranks are at {len(groups)} different places: {'; '.join(named)}{more}"


def group_lines(group: StackGroup) -> list[str]:
    """Return the lines that show a group: its ranks, their nodes and steps, and the stack."""
    stacks = group.stacks
    steps = sorted({stack.step for stack in stacks if stack.step is not None})
    words = {text for stack in stacks for text in (stack.role, stack.doing) if text}
    hosts = _few(sorted({stack.host for stack in stacks}))
    about = [f"{ranks_of(stacks)} on {hosts}", *([_steps(steps)] if steps else []), *sorted(words)]
    lines = [f"{', '.join(about)}:"]
    for number, thread in enumerate(group.threads):
        if number:
            lines.append(f"  thread {thread.name}:")
        lines += [f"  {line}" for line in _frame_lines(thread.frames)]
    return lines if group.threads else [*lines, "  (no Python code is running)"]


def ranks_of(stacks: Sequence[Stack]) -> str:
    """Return ``rank 3``, ``ranks 0-2, 5``, or the numbers of processes that are not ranks."""
    numbers = sorted(stack.rank for stack in stacks if stack.rank is not None)
    return ranges(numbers, "rank") if numbers else f"pid {_few([str(one.pid) for one in stacks])}"


def ranges(numbers: Sequence[int], noun: str = "") -> str:
    """Return ascending numbers as ``0-2, 5``, after ``noun`` in singular or plural if there is one."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = _few([f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs])
    return f"{noun}{'' if len(numbers) == 1 else 's'} {text}" if noun else text


def _frame_lines(frames: Sequence[Frame]) -> list[str]:
    """Return a line for each frame; neighboring frames of this package and of Python become one line."""
    lines: list[str] = []
    for hidden, found in groupby(frames[:-1], lambda frame: _is_hidden(frame.file)):
        group = list(found)
        if hidden:
            lines.append(f"… {len(group)} frames of hpcrun and Python")
        else:
            lines += map(_line, group)
    return [*lines, *map(_line, frames[-1:])]


def _is_hidden(file: str) -> bool:
    return is_package_code(file) or file.startswith(("<frozen", sys.base_prefix + "/lib/python"))


def _line(frame: Frame) -> str:
    # For a library, the name is enough.
    file = _INSTALLED.sub("", frame.file)
    return f"{file}:{frame.line} in {frame.function}"


def _with_originals(thread: Thread, names: dict[str, str]) -> Thread:
    for frame in thread.frames:
        if frame.file not in names:
            names[frame.file] = original(frame.file)[0]
    frames = (Frame(names[frame.file], frame.line, frame.function) for frame in thread.frames)
    return Thread(thread.name, tuple(frames))


def _steps(steps: Sequence[int]) -> str:
    if not steps:
        return "before the first step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def _is(stacks: Sequence[Stack]) -> str:
    return "is" if len(stacks) == 1 else "are"


def _few(words: Sequence[str]) -> str:
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more


def _rank(stack: Stack) -> int:
    return sys.maxsize if stack.rank is None else stack.rank
