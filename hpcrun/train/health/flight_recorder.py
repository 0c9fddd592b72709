"""The flight recorders of torch.distributed: which collectives each process group has begun.

There is one of NCCL's collectives and, in newer versions of torch, one of gloo's. The files of all
ranks are compared by ``torchfrtrace FOLDER --prefix flight-nccl-rank-``.
"""

import contextlib
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d as c10d

from hpcrun.train.parallel.process_group import group_names, trees

_LATEST = 32
"""Collectives of a group that are told: ranks that differ stop soon after."""

_SAME_SIZE = ("all_reduce", "allreduce", "all_gather", "reduce_scatter", "broadcast")

_DUMPS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}


def turn_on() -> None:
    """Have NCCL's collectives recorded where torch does not do so by itself. Before any process group."""
    if not hasattr(c10d, _DUMPS["gloo"]):
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")


def dump(folder: Path, rank: int) -> dict[str, list[tuple[int, str]]]:
    """Write ``flight-nccl-rank-3`` and the like; return the latest collectives begun in each group.

    They come in order, such as ``{"gloo/0": [(43, "all_reduce of 144")]}``, with a size where no rank's may
    differ; a group of this rank in which it has begun nothing has an empty list. A recorder that cannot be
    read is passed over: whoever asks has little time left.
    """
    begun: dict[str, dict[int, str]] = {}
    for kind, data in _recorded():
        begun.update({f"{kind}/{name}": {} for name in group_names()})
        # What this process itself has just made: no foreign pickle.
        entries = pickle.loads(data).get("entries", ())
        if entries:
            with contextlib.suppress(OSError):
                (folder / f"flight-{kind}-rank-{rank}").write_bytes(data)
        for entry in entries:
            # The small groups of a tree have no name: their own collectives say who waits for a leader.
            if not entry.get("is_p2p") and entry["process_group"][0]:
                group = begun.setdefault(f"{kind}/{entry['process_group'][0]}", {})
                group[int(entry["collective_seq_id"])] = _named(entry)
    for tree in trees():
        begun[f"control/{tree.group_name}"] = dict(tree.begun())
    return {group: sorted(told.items())[-_LATEST:] for group, told in begun.items()}


def _named(entry: dict[str, Any]) -> str:
    name = str(entry.get("profiling_name", "")).rpartition(":")[2].strip("_")
    # Into several tensors, each rank may give another size.
    sizes = entry.get("output_sizes") or []
    if name.removesuffix("_base") not in _SAME_SIZE or len(sizes) != 1:
        return name
    return f"{name} of {math.prod(sizes[0])}"


def _recorded() -> Iterator[tuple[str, bytes]]:
    for kind, name in _DUMPS.items():
        read: Any = getattr(c10d, name, None)
        data = None
        with contextlib.suppress(RuntimeError):
            data = read() if read is not None else None
        if data:
            yield kind, data
