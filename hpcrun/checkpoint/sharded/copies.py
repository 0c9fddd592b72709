"""Tensors that several ranks hold: one rank reads each of them, and broadcasts it to the other ranks.

DDP holds every tensor on every rank, and HSDP every shard once per copy of the model. If each rank read all
that it holds, 512 ranks would read a checkpoint 512 times from the shared disk. Here the ranks divide the
bytes, so each byte leaves the disk once, and all ranks read at the same time. The broadcasts use the groups
of the training, so on GPUs the bytes take NCCL's path between the devices.

The reader compares a tensor with its hash; the receivers do not. Every gradient of the training takes the
same path, protected by the checksums of TCP, InfiniBand, NVLink and PCIe. A path that changes bits spoils
the next step anyway, so a hash of what arrives would not make the training safer. On a GPU it would cost a
copy of all weights to the host.

Each rank writes some of these tensors. DDP keeps them the same. Without DDP the ranks may differ, and the
checkpoint would mix the values of several ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrun.checkpoint.sharded.host_staging import bytes_of
from hpcrun.ranks.collective import Ranks
from hpcrun.storage.errors import CheckpointError

# Bytes. Small tensors are sent together, since each broadcast has a latency.
_LEAST = 1 << 20
_BUCKET = 32 << 20
# Bytes of one broadcast: a limit for counters in backends, and for their buffers.
_CHUNK = 256 << 20
_ALIGNED = 16


class _Holders(NamedTuple):
    """The ranks that hold the same values: a name that is the same on all ranks, and the group."""

    name: str
    group: Any


@dataclass(frozen=True)
class Bucket:
    """Tensors of one reader: their local parts, the reader's global rank, and the group of the holders."""

    names: tuple[str, ...]
    parts: tuple[Tensor, ...]
    reader: int
    group: Any


class Copies:
    """A division of the reading of ``tensors`` among the ranks that hold the same values. Not collective.

    Args:
        tensors: the tensors to load into, by name; the same names on every rank.
        position: function that returns the place of a tensor in the checkpoint; neighbors are read together.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        ranks: Ranks,
        position: Callable[[str], tuple[str, int]],
    ) -> None:
        self._tensors, self._rank = tensors, ranks.rank
        holders = {
            name: _holders(value, ranks) if ranks.world_size > 1 else None
            for name, value in tensors.items()
        }
        self._by_holders: dict[_Holders, list[str]] = {}
        for name in sorted(tensors, key=lambda each: (position(each), each)):
            found = holders[name]
            if found is not None:
                self._by_holders.setdefault(found, []).append(name)
        kinds = [
            (name, tuple(value.shape), str(value.dtype), found and found.name)
            for (name, value), found in zip(tensors.items(), holders.values(), strict=True)
        ]
        self.key = xxhash.xxh3_128_hexdigest(repr(kinds).encode())
        """Hash of the division. The ranks may divide the reading only if their keys are equal."""
        self._buckets: list[Bucket] = []

    def divide(self) -> dict[str, Tensor]:
        """Return the tensors that this rank reads; :meth:`spread` sends them to the other ranks."""
        # All ranks use the groups in one order, so that no two ranks wait for each other in two groups.
        self._buckets = [
            bucket
            for holders in sorted(self._by_holders, key=lambda each: each.name)
            for bucket in self._fill(holders, self._by_holders[holders])
        ]
        others = {
            name for bucket in self._buckets if bucket.reader != self._rank for name in bucket.names
        }
        return {name: value for name, value in self._tensors.items() if name not in others}

    def spread(self) -> None:
        """Broadcast every tensor from its reader to the ranks that hold it, in place. Collective.

        An error is raised immediately, without a report to the other ranks: they wait in a broadcast for this
        rank, and must see the end of its connections.
        """
        for bucket in self._buckets:
            broadcast(bucket, self._rank == bucket.reader)

    def _fill(self, holders: _Holders, names: Iterable[str]) -> Iterable[Bucket]:
        """Yield buckets of neighbors in the checkpoint, each for the rank with the fewest bytes so far."""
        ranks = dist.get_process_group_ranks(holders.group)
        # In a tree of control groups, a broadcast from another rank than rank 0 takes a detour.
        loads = dict.fromkeys(ranks[:1] if holders.name == _CONTROL else ranks, 0)
        parts = {name: _local(self._tensors[name]) for name in names}
        share = sum(part.nbytes for part in parts.values()) // len(loads)
        sizes = {name: part.nbytes for name, part in parts.items()}
        for group in in_groups(sizes, max(_LEAST, min(share, _BUCKET))):
            reader = min(loads, key=lambda rank: (loads[rank], rank))
            loads[reader] += sum(sizes[name] for name in group)
            found = tuple(parts[name] for name in group)
            yield Bucket(tuple(group), found, reader, holders.group)


_CONTROL = "control"


def _holders(value: Tensor, ranks: Ranks) -> _Holders | None:
    """Return the ranks that hold the same part of ``value``; None if this rank reads it itself."""
    device = value.device.type
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        dimensions = [
            (mesh.size(number), -number)
            for number, placement in enumerate(value.placements)
            if placement.is_replicate() and mesh.size(number) > 1
        ]
        if not dimensions:
            return None
        number = -max(dimensions)[1]
        group = mesh.get_group(number)
        shape = "x".join(map(str, mesh.shape))
        return (
            _Holders(f"mesh {shape} {number} {device}", group) if supports(group, device) else None
        )
    whole = dist.group.WORLD
    if whole is None or dist.get_world_size() != ranks.world_size:
        return None
    if supports(whole, device):
        return _Holders(f"all {device}", whole)
    if device == "cpu" and ranks.group is not None:
        return _Holders(_CONTROL, ranks.group)
    return None


def supports(group: Any, device: str) -> bool:
    """Return True if ``group`` has a backend for tensors of ``device``."""
    return any(each.type == device for each in group._device_types)


def in_groups(sizes: Mapping[str, int], limit: int) -> Iterable[list[str]]:
    """Yield the names in their order, in groups of at most ``limit`` in sum, or of one larger tensor."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def broadcast(bucket: Bucket, sends: bool) -> None:
    """Broadcast the tensors of ``bucket`` from its reader, in place; ``sends``: this rank is the reader."""
    parts = [part for part in bucket.parts if part.numel()]
    if len(parts) == 1 and parts[0].is_contiguous():
        for chunk in _chunks(_bytes(parts[0])):
            dist.broadcast(chunk, bucket.reader, group=bucket.group)
        return
    if not parts:
        return
    # No padding at the end: another rank may hold a single part contiguously, and receives only its bytes.
    starts, size = [], 0
    for part in parts:
        starts.append(-(-size // _ALIGNED) * _ALIGNED)
        size = starts[-1] + part.nbytes
    packed = torch.empty(size, dtype=torch.uint8, device=parts[0].device)
    places = [packed[at : at + part.nbytes] for at, part in zip(starts, parts, strict=True)]
    if sends:
        for place, part in zip(places, parts, strict=True):
            place.copy_(_bytes(part.contiguous()))
    for chunk in _chunks(packed):
        dist.broadcast(chunk, bucket.reader, group=bucket.group)
    if not sends:
        for place, part in zip(places, parts, strict=True):
            part.copy_(place.view(part.dtype).view(part.shape))


def _chunks(flat: Tensor) -> Iterable[Tensor]:
    return (flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK))


def _bytes(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def _local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def require_alike(
    tensors: Mapping[str, Tensor] | None, alike: Callable[[str], bool], ranks: Ranks
) -> bool:
    """Raise CheckpointError on all ranks unless all have the same bits. Collective.

    Args:
        tensors: this rank's tensors by name; None if it has none.
        alike: returns True for names to compare; sharded tensors are skipped.

    Returns:
        True if all ranks had tensors to compare.
    """
    mine = (
        None
        if tensors is None
        else {
            name: xxhash.xxh3_64_intdigest(bytes_of(value.detach().cpu().contiguous()))
            for name, value in tensors.items()
            if alike(name) and not isinstance(value, DTensor)
        }
    )
    everyone = ranks.gather(mine)
    if None in everyone:
        return False
    first, *others = everyone
    names = sorted(name for name in first if any(first[name] != each.get(name) for each in others))
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise CheckpointError(
            f"{names[0]}{more} differs between the ranks, but a checkpoint stores it once; wrap the model "
            "in DistributedDataParallel, or start from the same weights and average the gradients each step"
        )
    return True
