"""The part of a save for which a training step waits: the snapshot, compared with a copy of the same bytes.

The copy goes to existing memory. So does the snapshot, except for the first, whose memory the kernel has to
clear, page by page. The faults and the CPU seconds show this on any machine.
"""

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Way:
    """A method to save: the call, the test for a finished write, and the callback for its end."""

    save: Callable[[], None]
    over: Callable[[], bool] = lambda: True
    drain: Callable[[], None] = lambda: None


COMPARED = ("memcpy", "hpcrun, thread")


def calls(way: Way, *, drain: bool = False) -> dict[str, float]:
    """Return the seconds of a call, for which training waits, its CPU seconds and its page faults."""
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    cpu, began = time.thread_time(), time.perf_counter()
    way.save()
    seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults
    if drain:
        way.drain()
    return {"seconds": seconds, "cpu": cpu, "faults": faults}


def show_snapshot(figures: dict[str, Any]) -> None:
    """Print the part of a save for which a step waits, round by round, and what its first call costs."""
    rounds, first = figures["snapshot"]["rounds"], figures["snapshot"]["first"]
    copies, ours = zip(*rounds, strict=True)
    ratios = [mine["seconds"] / copy["seconds"] for copy, mine in rounds]
    processor = [mine["cpu"] / copy["cpu"] for copy, mine in rounds]
    within = sum(one <= 1.5 for one in ratios)
    print(f"\nThe call, for which a step waits, over a copy of the same bytes: {_row(ratios)}")
    print(f"- {within} of {len(ratios)} rounds within 1.5; by CPU time {_row(processor)}")
    for name, rows in (("copy", copies), ("later calls", ours), ("first call", [first])):
        middle = {key: statistics.median(row[key] for row in rows) for key in first}
        print(
            f"- {name}: {middle['seconds']:.3f} s, {middle['cpu']:.3f} s of CPU, {middle['faults']:,.0f} "
            "page faults"
        )
    print(f"Added to training until it is on disk, over the copy: {_row(figures['added_rounds'])}")


def _row(ratios: Sequence[float | None]) -> str:
    return " ".join("-" if one is None else f"{one:.2f}" for one in ratios)
