"""Read torch.distributed's flight recorders: the collectives that each process group has started.

NCCL has a flight recorder, and in newer versions of torch gloo has one too.
``torchfrtrace FOLDER --prefix flight-nccl-rank-`` compares the files of all ranks.
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
"""Number of a group's latest collectives to report: ranks that differ stop soon after."""

_SAME_SIZE = ("all_reduce", "allreduce", "all_gather", "reduce_scatter", "broadcast")

_DUMPS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}


def turn_on() -> None:
    """Turn on NCCL's recorder if torch leaves it off. Call before making any process group."""
    if not hasattr(c10d, _DUMPS["gloo"]):
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")


def dump(folder: Path, rank: int) -> dict[str, list[tuple[int, str]]]:
    """Write ``flight-nccl-rank-3`` etc.; return the latest collectives started in each group.

    The collectives are in order, such as ``{"gloo/0": [(43, "all_reduce of 144")]}``; the size is given if
    it must be the same on all ranks. A group in which this rank has started nothing has an empty list. An
    unreadable recorder is skipped, since the process is about to end.
    """
    begun: dict[str, dict[int, str]] = {}
    for kind, data in _recorded():
        begun.update({f"{kind}/{name}": {} for name in group_names()})
        # Safe to unpickle: this process itself has just made the data.
        entries = pickle.loads(data).get("entries", ())
        if entries:
            with contextlib.suppress(OSError):
                (folder / f"flight-{kind}-rank-{rank}").write_bytes(data)
        for entry in entries:
            # Groups inside a control tree have no name; the tree's own collectives show who waits.
            if not entry.get("is_p2p") and entry["process_group"][0]:
                group = begun.setdefault(f"{kind}/{entry['process_group'][0]}", {})
                group[int(entry["collective_seq_id"])] = _named(entry)
    for tree in trees():
        begun[f"control/{tree.group_name}"] = dict(tree.begun())
    return {group: sorted(names.items())[-_LATEST:] for group, names in begun.items()}


def _named(entry: dict[str, Any]) -> str:
    name = str(entry.get("profiling_name", "")).rpartition(":")[2].strip("_")
    # With several output tensors, the sizes may differ between ranks.
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
