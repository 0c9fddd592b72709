"""The program that ``test_tree_group.py`` starts: real processes with a control group that is a tree.

``python -m tests.control.ranks FOLDER`` leaves a file for each rank and question in the folder.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpcrun.control import making
from hpcrun.control.tree_group import TreeGroup
from hpcrun.lifecycle.agreement import StopAgreement
from hpcrun.lifecycle.signals import StopReason
from hpcrun.train.health import flight_recorder
from hpcrun.train.parallel import process_group
from tests.train.forks import fork_ranks

WORLD = 7
LIMIT = timedelta(seconds=400)
"""Longer than the test allows an end to take: no rank may wait for it."""


def group_of(rank: int, folder: Path, name: str) -> TreeGroup:
    """Meet the other ranks, and make a control group, which is a tree with a fan-out of 2."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"rendezvous-{name}"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=LIMIT)
    making.FAN_OUT = 2
    group = making.new_control_group(timeout=LIMIT)
    assert isinstance(group, TreeGroup)
    return group


def agree(rank: int, folder: Path) -> None:
    """Request one stop on each rank in turn, and record when this rank reads each."""
    group = group_of(rank, folder, "agree")
    agreement, stops = StopAgreement(group), []
    for step in range(15):
        local = StopReason.TERMINATE if step == 3 + rank else StopReason.NONE
        if agreement.exchange(step, local):
            stops.append(step)
    agreement.finish()
    tell(folder, "stops", rank, " ".join(map(str, stops)))
    found = [None] * WORLD
    dist.all_gather_object(found, f"rank {rank}", group=group)
    tell(folder, "objects", rank, str(found))
    seconds = [limit(group)]
    with process_group.waiting_at_least(1925.0):
        seconds.append(limit(group))
    seconds.append(limit(group))
    tell(folder, "limits", rank, " ".join(map(str, seconds)))
    begun = flight_recorder.dump(folder, rank)[f"control/{group.group_name}"]
    tell(folder, "begun", rank, begun[0][1])
    dist.barrier(group=group)
    process_group.cleanup_distributed()


def limit(group: TreeGroup) -> float:
    """Seconds that a collective of ``group`` may take."""
    return group.options._timeout.total_seconds()


def dying(dead: int) -> Callable[[int, Path], None]:
    """Kill rank ``dead``; the other ranks keep their processes and do not exit."""

    def play(rank: int, folder: Path) -> None:
        group = group_of(rank, folder, f"death-{dead}")
        dist.barrier(group=group)
        if rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            dist.barrier(group=group)
        except RuntimeError:
            tell(folder, f"death-{dead}", rank, str(time.monotonic() - began))
        # The exit of a rank must not end the other ranks.
        until = time.monotonic() + 300
        while time.monotonic() < until and len(list(folder.glob(f"death-{dead}-*"))) < WORLD - 1:
            time.sleep(0.1)

    return play


def tell(folder: Path, what: str, rank: int, text: str) -> None:
    (folder / f".{what}-{rank}").write_text(text)
    (folder / f".{what}-{rank}").rename(folder / f"{what}-{rank}")


def main(folder: Path) -> int:
    """Run everything; the exit status is 0 only if every rank that was not killed reached the end."""
    codes = fork_ranks(WORLD, lambda rank: agree(rank, folder))
    wanted = [0] * WORLD
    for dead in (0, 2, 4, 5):
        play = dying(dead)
        codes += fork_ranks(WORLD, lambda rank, play=play: play(rank, folder))
        wanted += [-signal.SIGKILL if rank == dead else 0 for rank in range(WORLD)]
    if codes != wanted:
        print(f"exit codes {codes}")
    return int(codes != wanted)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
