"""Resources that jobs requested and used, from Slurm's accounting."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcrun.slurm.commands import SACCT_USAGE_FIELDS
from hpcrun.slurm.notation import JOB_ID, seconds

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}


@dataclass(frozen=True)
class AttemptUsage:
    """One attempt of a job; None if accounting has no value.

    Args:
        elapsed: seconds.
        time_limit: seconds.
        cpus: allocated CPUs, over all nodes.
        cpu_seconds: CPU time of all processes.
        gpus: allocated GPUs, over all nodes.
        memory_asked: bytes, over all nodes.
        memory_used: bytes, over all nodes: the peaks of the tasks of one step, added. The peaks may come
            at different times, so the true peak is at most this.
        start: Unix seconds; None: it has not begun.
    """

    job_id: str
    state: str
    elapsed: int
    time_limit: int | None
    cpus: int | None
    cpu_seconds: float | None
    nodes: int | None
    gpus: int | None
    memory_asked: int | None
    memory_used: int | None
    start: int | None = None


def parse_sacct_usage(text: str) -> list[AttemptUsage]:
    """Return a record for each attempt, in sacct's order. Lines of another shape are ignored."""
    attempts: list[tuple[list[str], list[list[str]]]] = []
    for line in text.splitlines():
        row = line.strip().split("|")
        if len(row) != len(SACCT_USAGE_FIELDS):
            continue
        if JOB_ID.fullmatch(row[0]):
            attempts.append((row, []))
        elif attempts and row[0].startswith(f"{attempts[-1][0][0]}."):
            attempts[-1][1].append(row)
    return [_usage(job, steps) for job, steps in attempts]


def _usage(job: Sequence[str], steps: Sequence[Sequence[str]]) -> AttemptUsage:
    job_id, state, elapsed, limit, cpus, cpu_time, nodes, asked, *_ = job
    allocated = _tres(asked)
    used = [size for step in steps if (size := _step_memory(step)) is not None]
    gpus = allocated.get("gres/gpu")
    return AttemptUsage(
        job_id=job_id,
        state=state.partition(" ")[0].rstrip("+"),
        elapsed=_whole(elapsed) or 0,
        time_limit=None if (minutes := _whole(limit)) is None else minutes * 60,
        cpus=_whole(cpus),
        # A job without steps, or one that still runs, has no CPU time: not zero seconds of it.
        cpu_seconds=seconds(cpu_time) or None,
        nodes=_whole(nodes),
        gpus=None if gpus is None else _whole(gpus),
        memory_asked=_bytes(allocated.get("mem", "")),
        memory_used=max(used, default=None),
        start=_whole(job[11]),
    )


def _step_memory(step: Sequence[str]) -> int | None:
    """Return the memory of a step over all nodes, in bytes."""
    total = _bytes(_tres(step[10]).get("mem", ""))
    if total:
        return total
    peak, tasks = _bytes(step[8]), _whole(step[9])
    return peak * (tasks or 1) if peak else None


def _tres(text: str) -> Mapping[str, str]:
    pairs = (word.partition("=") for word in text.split(",") if word)
    return {name: value for name, _, value in pairs}


def _bytes(text: str) -> int | None:
    found = _SIZE.fullmatch(text.strip())
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def _whole(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None
