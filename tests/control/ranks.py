"""Program of ``test_tree_group.py``: real processes with a control group that is a tree; one is killed.

``python -m tests.control.ranks FOLDER`` leaves a file for each rank that ends with an error.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpcrun.control import making
from tests.train.forks import fork_ranks

WORLD = 7
# Rank 0 leads all, rank 4 leads ranks 5 and 6, and rank 5 leads no rank.
DEAD = (0, 4, 5)
LIMIT = timedelta(seconds=400)
"""Longer than the test allows an end to take: no rank may wait for it."""


def play(rank: int, folder: Path, dead: int) -> None:
    """Kill rank ``dead``; the other ranks record how long they wait, and keep their processes."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"rendezvous-{dead}"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=LIMIT)
    making.FAN_OUT = 2
    group = making.new_control_group(timeout=LIMIT)
    dist.barrier(group=group)
    if rank == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        dist.barrier(group=group)
    except RuntimeError:
        waited = folder / f"waited-{dead}-{rank}"
        waited.with_suffix(".part").write_text(str(time.monotonic() - began))
        waited.with_suffix(".part").rename(waited.with_suffix(".txt"))
    # The exit of a rank must not end the other ranks.
    until = time.monotonic() + 300
    while time.monotonic() < until and len([*folder.glob(f"waited-{dead}-*.txt")]) < WORLD - 1:
        time.sleep(0.1)


def main(folder: Path) -> int:
    """Kill one rank after the other; the exit status is 0 only if every other rank reached the end."""
    for dead in DEAD:
        codes = fork_ranks(WORLD, lambda rank, dead=dead: play(rank, folder, dead))
        if codes != [-signal.SIGKILL if rank == dead else 0 for rank in range(WORLD)]:
            print(f"exit codes {codes}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
