"""Snapshots: page-locked host memory, and the time of hpcrun's copy to it."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acceptancelib.outcome import REPORT, Job, Outcome, needs_gpu
from acceptancelib.world import device_of
from hpcrun.checkpoint.sharded.host_staging import Staging, copy_in
from hpcrun.checkpoint.sharded.plan import TensorChunk
from hpcrun.devices import accelerator, vendor

_TENSORS, _ROUNDS = 16, 5
SLOW = 1.5
"""Factor of a snapshot's time over a plain copy from which it counts as slow."""


def check(job: Job) -> list[Outcome]:
    """Stage tensors as a checkpoint does; compare bytes and time with a plain copy."""
    device = device_of(job)
    refusals: list[str] = []

    def pin(address: int, size: int) -> Callable[[], object] | None:
        unlock, reason = vendor.lock_pages(address, size)
        refusals.append(reason)
        return unlock

    count = 1 << 20 if job.simulated else 1 << 24  # numbers per tensor: 64 MB or 1 GB in all
    values = [torch.randn(count, device=device) for _ in range(_TENSORS)]
    staging = Staging(limit=2 * _TENSORS * 4 * count, pinned=not job.simulated, pin=pin)
    parts = [_part(number, count) for number in range(_TENSORS)]
    buffer = staging.reserve(_TENSORS * 4 * count)
    ours = _seconds(device, lambda: copy_in(buffer, parts, values))
    plain = [
        torch.empty_like(value, device="cpu", pin_memory=not job.simulated) for value in values
    ]
    theirs = _seconds(device, lambda: _copy(plain, values))
    figures = {
        "bytes": _TENSORS * 4 * count,
        "seconds": ours,
        "plain_seconds": theirs,
        "lock_refusals": refusals,
        "equal": _equal(buffer, plain),
    }
    locked = needs_gpu("page lock") if job.simulated else _locked(figures)
    return [locked, snapshot(figures)]


def snapshot(figures: dict[str, Any]) -> Outcome:
    """Return the outcome of a snapshot's bytes and time."""
    size, ours, theirs = figures["bytes"], figures["seconds"], figures["plain_seconds"]
    if not figures["equal"]:
        return Outcome("snapshot", "fail", "the snapshot differs from the tensors", REPORT, figures)
    line = (
        f"{size / 1e9:.2f} GB in {ours:.3f} s ({size / ours / 1e9:.1f} GB/s), {ours / theirs:.2f} x a plain "
        "copy; same bytes"
    )
    if ours > SLOW * theirs:
        return Outcome(
            "snapshot",
            "warn",
            line,
            "run it again on an idle node; if the factor stays, " + REPORT,
            figures,
        )
    return Outcome("snapshot", "pass", line, details=figures)


def _locked(figures: dict[str, Any]) -> Outcome:
    if any(figures["lock_refusals"]) or not figures["lock_refusals"]:
        return Outcome(
            "page lock",
            "warn",
            f"the pages cannot be locked ({', '.join(figures['lock_refusals'])}); snapshots take longer",
            "raise the limit of locked memory (ulimit -l), or the container's (--ulimit memlock=-1)",
            figures,
        )
    return Outcome(
        "page lock", "pass", f"{figures['bytes'] / 1e9:.2f} GB of host memory page-locked"
    )


def _part(number: int, count: int) -> TensorChunk:
    size = 4 * count
    return TensorChunk(f"tensor{number}", "float32", (count,), (0,), (count,), number * size, size)


def _copy(host: list[Tensor], values: list[Tensor]) -> None:
    for target, value in zip(host, values, strict=True):
        target.copy_(value, non_blocking=True)


def _seconds(device: torch.device, copy: Callable[[], object]) -> float:
    """Return the time of the fastest of several copies."""
    found = []
    for _ in range(_ROUNDS):
        accelerator.synchronize(device)
        began = time.perf_counter()
        copy()
        accelerator.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)


def _equal(buffer: Tensor, plain: list[Tensor]) -> bool:
    whole = torch.cat(plain).view(torch.uint8)
    return torch.equal(buffer[: whole.numel()], whole)
