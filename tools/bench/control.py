#!/usr/bin/env python3
"""Cost of the ranks' control group as the ranks grow: gloo's full mesh compared with hpcrun's tree.

Threads of one process are the ranks. For each number of ranks, both groups are formed and used in turns:

- form: seconds from the first rank's call until every rank has its group
- descriptors: open files and sockets of a rank for the group, the average and the maximum over the ranks
- step: milliseconds of the stop agreement (a MAX of one integer) from the first rank's call until every rank
  has its result. The threads share the processor's cores and the interpreter: compare rows, and their growth
- processor: milliseconds of CPU time of the stop agreement on each rank
- objects: like step, for gathering a small object of every rank on every rank
"""

import argparse
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch._C import _distributed_c10d

from hpcrun.ranks.making import FAN_OUT
from hpcrun.ranks.tree_group import TreeGroup, levels

c10d: Any = _distributed_c10d
LIMIT = timedelta(seconds=600)
OBJECT = 128
"""Bytes of an object that a rank gives to a gathering."""


@dataclass(frozen=True)
class Cost:
    """The cost of one kind of group for a number of ranks; seconds and descriptors."""

    form: float
    average: float
    most: int
    step: float
    processor: float
    objects: float


class World:
    """Threads as ranks that run the same function together."""

    def __init__(self, size: int) -> None:
        self.size = size

    def each(self, play: Callable[[int], Any]) -> tuple[list[Any], float]:
        """Return the result of ``play`` for each rank, and the seconds until the last rank returned."""
        found: list[Any] = [None] * self.size
        troubles: list[Exception] = []
        start = threading.Barrier(self.size + 1)

        def run(rank: int) -> None:
            start.wait()
            try:
                found[rank] = play(rank)
            except Exception as error:
                troubles.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        start.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        if troubles:
            raise troubles[0]
        return found, time.perf_counter() - began


def flat(store: Any, rank: int, size: int) -> Any:
    """Return gloo's full-mesh group."""
    return c10d.ProcessGroupGloo(store, rank, size, LIMIT)


def tree(store: Any, rank: int, size: int) -> Any:
    """Return the tree that hpcrun makes of more than FAN_OUT ranks."""
    return TreeGroup(store, rank, size, LIMIT, fan_out=FAN_OUT)


def measure(size: int, make: Callable[[Any, int, int], Any], rounds: int) -> Cost:
    """Form a group of ``size`` ranks, use it, and close it."""
    world, store = World(size), c10d.HashStore()
    before = descriptors()
    groups, form = world.each(lambda rank: make(store, rank, size))
    average = (descriptors() - before) / size
    wanted = c10d.AllreduceOptions()
    wanted.reduceOp = c10d.ReduceOp.MAX

    def steps(rank: int) -> None:
        value = torch.tensor([rank], dtype=torch.int32)
        for _ in range(rounds):
            groups[rank].allreduce([value], wanted).wait()

    def objects(rank: int) -> None:
        mine = torch.full((OBJECT,), rank % 256, dtype=torch.uint8)
        into = [torch.empty_like(mine) for _ in range(size)]
        for _ in range(rounds):
            groups[rank].allgather([into], [mine], c10d.AllgatherOptions()).wait()

    world.each(steps)
    used = time.process_time()
    step = statistics.median(world.each(steps)[1] / rounds for _ in range(3))
    processor = (time.process_time() - used) / (3 * rounds * size)
    gathered = statistics.median(world.each(objects)[1] / rounds for _ in range(3))
    for group in groups:
        if isinstance(group, TreeGroup):
            group.shutdown()
    return Cost(form, average, most_of(size, make), step, processor, gathered)


def most_of(size: int, make: Callable[[Any, int, int], Any]) -> int:
    """Return the connections of rank 0, which has the most."""
    if make is flat:
        return size - 1
    return sum(len(level.members) - 1 for level in levels(0, size, FAN_OUT))


def descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def fits(size: int) -> bool:
    """Return True if one process may open a full mesh of this many ranks."""
    wanted = size * (size + 8)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True


def row(size: int, kind: str, cost: Cost | None) -> str:
    """Return a line of the table."""
    if cost is None:
        return f"| {size} | {kind} | | {size - 1 + 4} by formula | {size - 1} | | | |"
    return (
        f"| {size} | {kind} | {cost.form:.2f} s | {cost.average:.1f} | {cost.most} "
        f"| {1000 * cost.step:.2f} ms | {1000 * cost.processor:.2f} ms | {1000 * cost.objects:.2f} ms |"
    )


def main() -> int:
    """Print the table; return 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=20, help="collectives in a measurement")
    parser.add_argument("--quick", action="store_true", help="8 and 32 ranks, few rounds")
    options = parser.parse_args()
    sizes, rounds = ([8, 32], 3) if options.quick else (options.ranks, options.rounds)
    torch.set_num_threads(1)
    print(
        "| ranks | group | form | descriptors a rank | most connections | step | processor | objects |"
    )
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    for size in sizes:
        mesh = measure(size, flat, rounds) if fits(size) else None
        print(row(size, "full mesh", mesh), flush=True)
        ours = measure(size, tree, rounds)
        print(row(size, "tree", ours), flush=True)
    print(f"\nhpcrun uses the full mesh up to {FAN_OUT} ranks, and the tree above.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
