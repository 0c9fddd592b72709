"""Bits of all-reduce and reduce-scatter: equal in two fresh sets of processes."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from acceptancelib.outcome import REPORT, Job, Outcome, needs_gpu
from acceptancelib.world import Member, run_ranks

COUNT = 1 << 20
"""Numbers per rank in an all-reduce; a reduce-scatter has as many for each pair of ranks."""

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check(job: Job) -> list[Outcome]:
    """Compare the hashes of two sets of processes, with the variables of ``train.deterministic=true``."""
    names = ("all-reduce", "reduce-scatter")
    if job.gpus == 1:
        return [needs_gpu(name, "two GPUs") for name in names]
    first, second = run_ranks(job), run_ranks(job)
    return [compare(name, first, second) for name in names]


def compare(name: str, first: list[Any], second: list[Any]) -> Outcome:
    """Return the outcome of one collective from the results of two sets of ranks."""
    details = {"first": [rank[name] for rank in first], "second": [rank[name] for rank in second]}
    furthest = _worst([rank["furthest"][name] for rank in first + second])
    ranks = len(first)
    if not furthest < 0.05:  # not `>=`, which is false for NaN
        return Outcome(name, "fail", f"sums are wrong by up to {furthest:.2g}", REPORT, details)
    if name == "all-reduce" and any(rank[name] != first[0][name] for rank in first):
        return Outcome(name, "fail", "the ranks have different sums", REPORT, details)
    if details["first"] != details["second"]:
        kinds = [kind for kind in KINDS if any(
            one[name][kind] != two[name][kind] for one, two in zip(first, second, strict=True)
        )]  # fmt: skip
        return Outcome(
            name,
            "fail",
            f"two equal starts have different bits in {' and '.join(kinds)}",
            "interrupted runs differ in the last bits here; report the JSON file to NCCL and hpcrun",
            details,
        )
    return Outcome(
        name, "pass", f"{ranks} ranks, two starts, fp32 and bf16: the same bits", details=details
    )


def _worst(distances: Sequence[float]) -> float:
    """Return the largest distance; NaN if one is NaN, which max() may lose."""
    return math.nan if any(map(math.isnan, distances)) else max(distances)


def rank(here: Member) -> dict[str, Any]:
    """Return the hashes of this rank's results, and their largest distances from sums in float64."""
    found: dict[str, Any] = {"all-reduce": {}, "reduce-scatter": {}, "furthest": {}}
    number, ranks = here.distributed.rank, here.distributed.world_size
    for kind, dtype in KINDS.items():
        total = _values(number, COUNT, dtype).to(here.device)
        dist.all_reduce(total)
        _note(found, "all-reduce", kind, total, _sum(ranks, COUNT, dtype))
        chunk = torch.empty(COUNT, dtype=dtype, device=here.device)
        dist.reduce_scatter_tensor(chunk, _values(number, COUNT * ranks, dtype).to(here.device))
        own = _sum(ranks, COUNT * ranks, dtype)[number * COUNT : (number + 1) * COUNT]
        _note(found, "reduce-scatter", kind, chunk, own)
    return found


def _note(found: dict[str, Any], name: str, kind: str, value: Tensor, expected: Tensor) -> None:
    host = value.cpu()
    found[name][kind] = hashlib.sha256(host.view(torch.uint8).numpy().tobytes()).hexdigest()
    # Relative to the size of the sum: bf16 has eight bits.
    furthest = ((host.double() - expected).abs().max() / expected.abs().max()).item()
    found["furthest"][name] = _worst([furthest, found["furthest"].get(name, 0.0)])


def _values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator).to(dtype)


def _sum(ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(count, dtype=torch.float64)
    for rank in range(ranks):
        total += _values(rank, count, dtype).double()
    return total
