#!/usr/bin/env python3
"""Growth of checkpoint metadata with the ranks, measured with virtual ranks in one process.

Each virtual rank writes a tiny file through the real code: its shard of each of --tensors tensors.
Rank 0 does the work of a real run. Times are "wall clock / CPU", in seconds. --plan measures only the plan of
the first save, in seconds of CPU:

- rank: every rank's description of its tensors, and its part of the plan
- rank 0: rank 0's choice of the writers, in addition
- up, down: bytes of the objects that rank 0 receives and sends

Without --plan:

- files: number of files of a checkpoint; manifest and index: their bytes
- ranks: seconds until each virtual rank has written its file, in turns; real ranks write in parallel
- commit: rank 0's index, manifest and rename, with a check of the size of every file
- prune: removing one of four checkpoints, with a check of the sizes of all files
- choose: the newest checkpoint at a start, with its index
- decode: every rank's work on the index at a start, before it reads tensors
- verify: `hpcrun verify`, which reads every byte of a checkpoint
"""

import argparse
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcrun.checkpoint.sharded.commit import CommitProtocol, SaveJob
from hpcrun.checkpoint.sharded.plan import WritePlan, describe, make_plan
from hpcrun.checkpoint.sharded.rank_file import RankShard, Written, own_name, write
from hpcrun.cli.commands.verify import verify
from hpcrun.ranks.collective import Ranks
from hpcrun.storage.index import INDEX, covered, decode
from hpcrun.storage.manifest import MANIFEST
from hpcrun.storage.store import CheckpointStore

T = TypeVar("T")
_SHAPES = 30
"""Shapes of the tensors, about as many as in a model with its optimizer. A rank has a row of each tensor: few
elements, because the metadata is what is measured."""
_OWN = bytes(200)
"""Bytes in the place of the random states of a rank."""


@dataclass(frozen=True)
class Virtual(Ranks):
    """Rank 0 of a world in which this process also acts as the other ranks."""

    others: Callable[[], list[Written]] = list

    def from_rank_0(self, compute: Callable[[], T]) -> T:
        """Return the result of ``compute``; the other ranks would receive the same."""
        return compute()

    def to_rank_0(self, value: Any) -> list[Any]:
        """Return the values of rank 0 and of the virtual ranks."""
        return [value, *self.others()]


class Clock:
    """Named times in seconds: wall clock, and CPU."""

    def __init__(self) -> None:
        self.spent: dict[str, tuple[float, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block."""
        wall, used = time.perf_counter(), time.process_time()
        yield
        self.spent[name] = time.perf_counter() - wall, time.process_time() - used

    def told(self, name: str, but: str = "") -> str:
        """Return the seconds of ``name``, without those of ``but``, which are part of them."""
        without = self.spent.get(but, (0.0, 0.0))
        wall, used = (whole - part for whole, part in zip(self.spent[name], without, strict=True))
        return f"{wall:.2f} / {used:.2f}"


@dataclass(frozen=True)
class Planning(Ranks):
    """Rank 0 while it plans: the virtual ranks have the same description. Counts seconds and bytes."""

    clock: Clock = field(default_factory=Clock)
    sent: dict[str, int] = field(default_factory=dict)

    def to_rank_0(self, value: Any) -> list[Any]:
        """Return the value of every rank, as received."""
        raw = pickle.dumps(value)
        self.sent["up"] = self.world_size * len(raw)
        with self.clock("received"):
            return [pickle.loads(raw) for _ in range(self.world_size)]

    def scatter_from_rank_0(self, compute: Callable[[], Sequence[T]]) -> T:
        """Return the value of rank 0."""
        with self.clock("chosen"):
            values = compute()
            self.sent["down"] = sum(len(pickle.dumps(value)) for value in values)
        return values[0]


def plan_of(world_size: int, tensors: int) -> tuple[WritePlan, str]:
    """Return rank 0's plan of tensors with a row on each rank, and the row of the table of plans."""
    ranks = Planning(0, world_size)
    clock = ranks.clock
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    state: dict[str, torch.Tensor] = {}
    for i in range(tensors):
        width = 1 + i % _SHAPES
        shape = torch.Size((world_size, width))
        state[f"layer.{i}.weight"] = DTensor.from_local(
            torch.zeros(1, width), mesh, [Shard(0)], run_check=False, shape=shape, stride=(width, 1)
        )
    with clock("all"):
        plan = make_plan(describe(state, bool), state, ranks)
    dist.destroy_process_group()
    spent = {name: used for name, (_, used) in clock.spent.items()}
    on_rank_0 = spent["received"] + spent["chosen"]
    times = f"{spent['all'] - on_rank_0:.2f} | {on_rank_0:.2f}"
    sizes = " | ".join(f"{ranks.sent[way] / 1000:,.0f} kB" for way in ("up", "down"))
    return plan, f"| {world_size:,} | {times} | {sizes} |"


def share_of(rank: int, plan: WritePlan) -> RankShard:
    """Return the bytes of one rank's file; all ranks have shards of the same sizes."""
    spans = tuple((part.position, part.length) for part in plan.parts)
    image = memoryview(bytes(plan.size) + _OWN)
    spans += ((plan.size, len(_OWN)),)

    def views() -> Iterator[memoryview]:
        return (image[position : position + length] for position, length in spans)

    return RankShard(spans, (own_name(rank),), views, image)


def save(store: CheckpointStore, step: int, plan: WritePlan, world_size: int) -> Clock:
    """Save one checkpoint of all virtual ranks; record the seconds of its parts."""
    clock = Clock()
    draft = store.root / f"step-{step:09d}.tmp-{store.owner}"

    def others() -> list[Written]:
        with clock("ranks"):
            return [
                write(share_of(rank, plan), store, draft, rank) for rank in range(1, world_size)
            ]

    protocol = CommitProtocol(
        store,
        Virtual(0, world_size, others=others),
        still_mine=lambda: None,
        after_commit=lambda _: None,
    )
    with clock("all"):
        outcome = protocol.run(SaveJob(step, plan, share_of(0, plan), {"step": step}))
    if not outcome.ok:
        raise SystemExit(f"scale.py: {outcome.error}")
    return clock


def measure(folder: Path, world_size: int, tensors: int) -> str:
    """Return the table's row for ``world_size`` ranks."""
    plan, _ = plan_of(world_size, tensors)
    store = CheckpointStore(folder, "bench-0")
    clock = [save(store, step, plan, world_size) for step in (1, 2, 3, 4)][-1]
    newest = store.path(4)
    files = sum(1 for _ in newest.iterdir())
    sizes = [(newest / name).stat().st_size for name in (MANIFEST, INDEX)]
    with clock("prune"):
        store.prune(3)
    with clock("choose"):
        chosen = store.newest_valid()
        raw = store.read(4, INDEX)
    if chosen is None or store.steps() != [4, 3, 2]:
        raise SystemExit("scale.py: the checkpoints are not those that were saved")
    with clock("decode"):
        index = decode(raw)
        whole = all(map(covered, index.tensors.values()))
    with clock("verify"):
        damaged = verify(store, [4], lambda *_: None)
    if damaged or not whole:
        raise SystemExit("scale.py: a checkpoint is damaged")
    told = [clock.told("ranks"), clock.told("all", but="ranks")]
    told += [clock.told(name) for name in ("prune", "choose", "decode", "verify")]
    kilobytes = [f"{size / 1000:,.0f} kB" for size in sizes]
    return f"| {world_size:,} | {files:,} | " + " | ".join([*kilobytes, *told]) + " |"


def main() -> int:
    """Print the table; return 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096, 8192])
    parser.add_argument("--tensors", type=int, default=50, help="tensors sharded over all ranks")
    parser.add_argument(
        "--dir", type=Path, help="folder for the checkpoints (default: the temporary folder)"
    )
    parser.add_argument("--plan", action="store_true", help="only the plan of the first save")
    parser.add_argument("--quick", action="store_true", help="8 and 64 ranks, few tensors")
    options = parser.parse_args()
    ranks, tensors = ([8, 64], 5) if options.quick else (options.ranks, options.tensors)
    if options.plan:
        print("| ranks | rank | rank 0 | up | down |\n|---:|---:|---:|---:|---:|")
        for world_size in ranks:
            print(plan_of(world_size, tensors)[1], flush=True)
        return 0
    print(
        "| ranks | files | manifest | index | ranks' files | commit | prune | choose | decode | verify |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for world_size in ranks:
        with tempfile.TemporaryDirectory(prefix="scale-", dir=options.dir) as folder:
            Path(folder).chmod(0o700)
            print(measure(Path(folder) / "checkpoints", world_size, tensors), flush=True)
    print(f"\n{tensors} tensors, each sharded over all ranks.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
