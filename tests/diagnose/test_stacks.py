"""Equal stacks form one group, and the named rank is the rank for which the others wait."""

from dataclasses import replace
from pathlib import Path

import pytest

import hpcrun
from hpcrun.diagnose.stacks import folded, group_lines, ranges, summary
from hpcrun.run.stacks import Frame, Stack, Thread

LOOP = str(Path(hpcrun.__file__).parent / "train" / "loop.py")
TORCH = "/env/lib/python3.11/site-packages/torch/distributed/c10d.py"


def stack(rank: int | None, line: int = 33, step: int | None = 17, idle: float = 60.0) -> Stack:
    frames = (
        Frame(LOOP, 4, "fit"),
        Frame(LOOP, 9, "step"),
        Frame("/home/me/task.py", line, "loss"),
        Frame(TORCH, 2810, "all_reduce"),
    )
    threads = (Thread("MainThread", frames), Thread(f"loader {rank}", frames[:1]))
    return Stack(rank, f"node{(rank or 0) // 2 + 1}", 100, threads, step, "training", idle)


def test_equal_stacks_are_one_group() -> None:
    stacks = [stack(rank) for rank in range(3)] + [stack(3, line=40)]
    groups = folded(stacks)
    assert [len(group.stacks) for group in groups] == [3, 1]
    main, loader = stacks[0].threads
    busy = Thread("loader", (Frame("loader.py", 7, "read"),))
    stacks[0] = replace(stacks[0], threads=(replace(main, name="thread 5"), busy, loader))
    stacks[1] = replace(stacks[1], threads=(main, loader, busy))
    assert [len(group.stacks) for group in folded(stacks)] == [3, 1]
    assert [len(group.stacks) for group in folded(stacks, all_threads=True)] == [2, 1, 1]
    assert group_lines(groups[0]) == [
        "ranks 0-2 on node1, node2, step 17, training:",
        "  … 2 frames of hpcrun and Python",
        "  /home/me/task.py:33 in loss",
        "  torch/distributed/c10d.py:2810 in all_reduce",
    ]


def test_the_rank_with_the_lowest_step_is_behind() -> None:
    groups = folded([stack(rank) for rank in range(3)] + [stack(3, line=40, step=16, idle=61.0)])
    assert summary(groups) == (
        "rank 3 is behind: step 16, the newest is 17; at /home/me/task.py:40 in loss; "
        "no rank has moved for 60 s"
    )


def test_within_one_step_the_rank_that_differs_is_named() -> None:
    groups = folded([stack(rank) for rank in (0, 1, 3)] + [stack(2, line=40)])
    assert summary(groups).startswith("rank 2 is elsewhere: at /home/me/task.py:40 in")


def test_no_rank_is_named_without_a_usual_place() -> None:
    moving = [stack(0, step=20, idle=0.2), stack(1, step=18, idle=0.1)]
    assert summary(folded(moving)).startswith("the ranks move: steps 18 to 20")
    alike = folded([stack(0), stack(1)])
    line = "ranks 0-1 are at the same place: /home/me/task.py:33 in loss"
    assert summary(alike) == line
    assert summary(alike, [3, 2]) == f"{line}; not read: tasks 2-3"
    assert "3 different places" in summary(folded([stack(0), stack(1, line=40), stack(2, line=41)]))


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            "/env/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
            " (in the data loader)",
        ),
        ("/usr/lib/python3.11/selectors.py", ""),
    ],
)
def test_of_two_ranks_the_one_outside_the_collective_is_named(file: str, words: str) -> None:
    frames = (Frame("/home/me/task.py", 51, "main"), Frame(file, 7, "get"))
    loading = replace(stack(1), threads=(Thread("MainThread", frames),))
    assert summary(folded([stack(0), loading])) == (
        f"rank 1 is elsewhere: at /home/me/task.py:51 in main{words}, the others at "
        "/home/me/task.py:33 in loss (in a collective)"
    )
    other = replace(loading, rank=2, threads=(Thread("MainThread", frames[:1]),))
    assert summary(folded([loading, other])) == (
        f"the ranks are at 2 different places: rank 1 at /home/me/task.py:51 in main{words}; "
        "rank 2 at /home/me/task.py:51 in main"
    )


def test_a_process_without_python_or_rank_is_shown() -> None:
    empty = replace(stack(0), threads=())
    (group,) = folded([empty])
    assert group_lines(group)[-1] == "  (no Python code is running)"
    assert "an unknown place" in summary([group])
    assert group_lines(folded([stack(None)])[0])[0].startswith("pid 100 on node1")


def test_launchers_and_workers_are_shown_and_not_compared() -> None:
    worker = replace(stack(None, line=50), role="a worker of rank 0", step=None, idle=None)
    launcher = replace(stack(None, line=51), role="a launcher", step=None, idle=None)
    groups = folded([stack(0), stack(1), worker, launcher])
    assert summary(groups).startswith("ranks 0-1 are at the same place")
    shown = [group_lines(group)[0] for group in groups]
    assert any("a worker of rank 0" in line for line in shown)
    assert summary(folded([launcher])) == "no rank could be read"


def test_numbers_are_shown_as_ranges() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges(range(0, 40, 2)).endswith("14 and 12 more")
