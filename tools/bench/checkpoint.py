#!/usr/bin/env python3
"""Cost of a checkpoint: wall time added to training, write throughput, restore; compared with other methods.

One process, one state, one run. All methods run in each of ``--repeat`` rounds, so that other work on the
machine affects all of them. Every figure is the median of the rounds, and every ratio the median of the
rounds' ratios. "Added" is the wall time that training lost from the call of the save over all
following steps until the write was complete, and over at least ``--window`` seconds of steps: a call that
returns immediately but slows the next hundred steps is not cheap. The output is a Markdown table.

    tools/bench/checkpoint.py --dir /scratch/bench            # 1.2 GB of state, about two minutes
    tools/bench/checkpoint.py --dir /scratch/bench --json
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointlib.memory import MemoryRestores
from checkpointlib.snapshot import COMPARED, Way, calls, show_snapshot
from torch import nn

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.checkpoint.sharded.rank_file import pack, stage, write
from hpcrun.checkpoint.sharded.restore import SHARED
from hpcrun.checkpoint.state.capture import alike, apply_shared, capture_shared, template
from hpcrun.checkpoint.state.tree import split
from hpcrun.ranks.collective import Ranks
from hpcrun.storage.store import CheckpointStore


class Training:
    """A model of the wanted size with Adam's moments, and steps that keep ``threads`` cores busy."""

    def __init__(self, gigabytes: float, threads: int, step_seconds: float) -> None:
        torch.set_num_threads(threads)
        width, layers = 2048, max(1, round(gigabytes * 1e9 / (3 * 4 * 2048 * 2048)))
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.left, self.right = torch.randn(512, 512), torch.randn(512, 512)
        began = time.perf_counter()
        for _ in range(20):
            self.left @ self.right
        self.products = max(1, round(step_seconds / ((time.perf_counter() - began) / 20)))

    def state(self) -> dict[str, Any]:
        return capture_shared(self.model, self.optimizer, extra={"step": 1})

    def step(self) -> None:
        """Compute products in cache, and one pass over part of the weights, like a small real step."""
        for _ in range(self.products):
            self.left @ self.right
        with torch.no_grad():
            self.model[0].weight.mul_(1.0)


def steps(training: Training, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        training.step()
    return time.perf_counter() - began


def added(training: Training, count: int, way: Way) -> tuple[float, float, float]:
    """Return the added wall seconds, the seconds of the call, and those until the write was complete.

    Runs steps until the write is complete, at least ``count``; the end is measured to the nearest step.
    """
    before = steps(training, count)
    began = time.perf_counter()
    way.save()
    call = time.perf_counter() - began
    made, written = 0, call if way.over() else 0.0
    while made < count or not written:
        training.step()
        made += 1
        if not written and way.over():
            written = time.perf_counter() - began
    way.drain()
    whole = time.perf_counter() - began
    pace = (before + steps(training, count)) / (2 * count)
    return whole - made * pace, call, written


class Ways:
    """The methods to save a state."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder, self.number = training, folder, 0
        self.copies = [torch.empty_like(value) for value in self.tensors()]
        self.store = CheckpointStore(folder / "engine", "1-0")
        self.engine = CheckpointEngine(
            self.store,
            Ranks(),
            still_mine=lambda: None,
            after_commit=self.keep_one,
        )
        self.future: Any = None
        self.child: Any = None
        self.last = 0.0
        self.notes: set[str] = set()

    def keep_one(self, step: int) -> None:
        self.store.prune(1, [step])

    def own_again(self) -> None:
        """Write to every page: after a fork, the first write to each page is slow for any process."""
        for value in [*self.tensors(), *self.copies, self.engine.staging.reserve(1)]:
            value.view(-1).view(torch.uint8)[::4096] += 0

    def tensors(self) -> list[torch.Tensor]:
        return list(split(self.training.state())[1].values())

    def fresh(self, name: str) -> Path:
        self.number += 1
        for old in self.folder.glob(f"{name}-*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        return self.folder / f"{name}-{self.number}"

    def memcpy(self) -> None:
        for copy, value in zip(self.copies, self.tensors(), strict=True):
            copy.copy_(value)

    def torch_save(self) -> None:
        with self.fresh("torch").open("wb") as stream:
            torch.save(self.training.state(), stream)
            stream.flush()
            os.fsync(stream.fileno())

    def dcp_save(self) -> None:
        dcp.save(self.training.state(), checkpoint_id=str(self.fresh("dcp")))

    def dcp_async_save(self) -> None:
        self.future = dcp.async_save(
            self.training.state(), checkpoint_id=str(self.fresh("dcp-async"))
        )

    def dcp_over(self) -> bool:
        return bool(self.future.done())

    def dcp_drain(self) -> None:
        self.future.result()

    def hpcrun(self) -> None:
        self.number += 1
        model = self.training.model
        self.engine.start(self.number, self.training.state(), {}, {}, alike(model))

    def hpcrun_over(self) -> bool:
        return not self.engine.under_way

    def hpcrun_drain(self) -> None:
        (outcome,) = self.engine.wait()
        if not outcome.ok:
            sys.exit(f"the save failed: {outcome.error}")
        self.notes |= set(outcome.notes)
        # Above the memory budget, training waits for the whole write.
        self.last = outcome.seconds - outcome.stalled or outcome.seconds

    def in_a_process(self) -> None:
        """Save the same snapshot with a forked process instead of a thread."""
        skeleton, tensors = split(self.training.state())
        blobs = {SHARED: pack(skeleton)}
        share = stage(self.engine._plan, tensors, blobs, self.shared_staging)
        draft = CheckpointStore(self.fresh("process"), "1-0")

        def work() -> None:
            write(share, draft, draft.begin(1), 0)

        self.child = multiprocessing.get_context("fork").Process(target=work)
        self.child.start()

    def process_over(self) -> bool:
        return not self.child.is_alive()

    def process_drain(self) -> None:
        self.child.join()
        if self.child.exitcode:
            sys.exit("the writing process failed")


def dd(folder: Path, size: int, *options: str) -> float:
    """Return the seconds for dd to write ``size`` bytes in blocks of 8 MiB with an fsync; NaN on failure."""
    target = folder / "dd.bin"
    blocks = size >> 23
    began = time.perf_counter()
    ended = subprocess.run(
        ["dd", "if=/dev/zero", f"of={target}", "bs=8M", f"count={blocks}", "conv=fsync", *options],
        check=False,
        capture_output=True,
    )
    seconds = time.perf_counter() - began
    target.unlink(missing_ok=True)
    if ended.returncode:
        return math.nan
    return seconds * size / (blocks << 23)


def read_file(path: Path, buffer: memoryview) -> float:
    """Return the seconds to read a file into existing memory, in blocks of 8 MiB."""
    began = time.perf_counter()
    with path.open("rb", buffering=0) as stream:
        position = 0
        while count := stream.readinto(buffer[position : position + (8 << 20)]):
            position += count
    return time.perf_counter() - began


def restore(training: Training, engine: CheckpointEngine) -> float:
    began = time.perf_counter()
    restored = engine.restore(template(training.model, training.optimizer))
    if restored is None:
        sys.exit("nothing to restore")
    apply_shared(restored.shared, training.model, training.optimizer)
    return time.perf_counter() - began


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = Path(arguments.dir) / f"hpcrun-bench-{os.getpid()}"
    folder.mkdir(parents=True)
    store = dist.FileStore(str(folder / "rendezvous"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        training = Training(arguments.gigabytes, arguments.threads, arguments.step)
        ways = Ways(training, folder)
        size = sum(value.nbytes for value in ways.tensors())
        table = {
            "memcpy": Way(ways.memcpy),
            "torch.save + fsync": Way(ways.torch_save),
            "dcp.save": Way(ways.dcp_save),
            "dcp.async_save": Way(ways.dcp_async_save, ways.dcp_over, ways.dcp_drain),
            "hpcrun, thread": Way(ways.hpcrun, ways.hpcrun_over, ways.hpcrun_drain),
            "hpcrun, process": Way(ways.in_a_process, ways.process_over, ways.process_drain),
        }
        count = max(10, round(arguments.window / arguments.step))
        first: dict[str, dict[str, float]] = {}
        for name, way in table.items():  # a warm-up of every method
            if name == "hpcrun, process":
                ways.shared_staging = SharedStaging()
            first[name] = calls(way)
            way.drain()
        snapshots = [[calls(table[name], drain=True) for name in COMPARED] for _ in range(5)]
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in table}
        writes, dds, directs, reads, restores, kept = [], [], [], [], [], []
        in_memory = MemoryRestores(
            folder / "memory",
            lambda engine: engine.save(1, training.state(), {}, {}, alike(training.model)),
        )
        memory = memoryview(bytearray(size + (1 << 20)))
        for _ in range(arguments.repeat):
            for name, way in table.items():
                found[name].append(added(training, count, way))
                if name == "hpcrun, process":
                    ways.own_again()
            dds.append(dd(folder, size))
            directs.append(dd(folder, size, "oflag=direct"))
            ways.hpcrun()
            ways.hpcrun_drain()
            writes.append(ways.last)
            step = ways.store.steps()[0]
            file = ways.store.path(step) / "rank-00000.bin"
            read_file(file, memory)  # into the page cache, from which both read
            reads.append(read_file(file, memory))
            restores.append(restore(training, ways.engine))
            kept.append(in_memory.seconds(lambda engine: restore(training, engine)))
        in_memory.close()
        middle = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)]
            for name, rows in found.items()
        }

        def ratio(above: list[float], below: list[float]) -> float:
            return statistics.median(a / b for a, b in zip(above, below, strict=True))

        def over(name: str) -> float | None:
            ours = [row[0] for row in found["hpcrun, thread"]]
            theirs = [row[0] for row in found[name]]
            return ratio(ours, theirs) if min(*ours, *theirs) > 0 else None

        return {
            "state_gigabytes": size / 1e9,
            "threads": arguments.threads,
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg()[0],
            "rounds": arguments.repeat,
            "notes": sorted(ways.notes),
            "ways": {
                name: {"added": row[0], "call": row[1], "until_written": row[2]}
                for name, row in middle.items()
            },
            "snapshot": {"first": first["hpcrun, thread"], "rounds": snapshots},
            "added_rounds": [
                ours[0] / copy[0] if min(ours[0], copy[0]) > 0 else None
                for copy, ours in zip(*(found[name] for name in COMPARED), strict=True)
            ],
            "added_over": {name: over(name) for name in table if not name.startswith("hpcrun")},
            "write_seconds": statistics.median(writes),
            "dd_seconds": statistics.median(dds),
            "write_over_dd": ratio(dds, writes),
            "dd_direct_seconds": statistics.median(directs),
            "write_over_dd_direct": ratio(directs, writes),
            "restore_seconds": statistics.median(restores),
            "read_seconds": statistics.median(reads),
            "restore_over_read": ratio(restores, reads),
            "memory_seconds": statistics.median(memory for memory, _ in kept),
            "disk_seconds": statistics.median(disk for _, disk in kept),
            "memory_over_disk": statistics.median(memory / disk for memory, disk in kept),
        }
    finally:
        dist.destroy_process_group()
        shutil.rmtree(folder, ignore_errors=True)


class SharedStaging(Staging):
    """A buffer that a forked process shares: a page written here is not copied for the child."""

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8).share_memory_()


def show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['state_gigabytes']:.2f} GB of state, {figures['threads']} of {figures['cores']} cores "
        f"train, {figures['rounds']} rounds, load {figures['load']:.1f}. Seconds.\n"
    )
    print("| | added to training | the call | until it is on disk | hpcrun against it |")
    print("|---|---|---|---|---|")
    aims = {"memcpy": ", aim <= 1.5", "dcp.async_save": ", aim < 1"}
    for name, row in figures["ways"].items():
        against = figures["added_over"].get(name)
        last = "" if against is None else f"{against:.2f} x added{aims.get(name, '')}"
        if name in figures["added_over"] and against is None:
            last = "none: a round lost nothing, which is noise"
        times = " | ".join(f"{row[key]:.3f}" for key in ("added", "call", "until_written"))
        print(f"| {name} | {times} | {last} |")
    for note in figures["notes"]:
        print(f"| hpcrun | | | {note} | |")
    size = figures["state_gigabytes"]
    ours = figures["write_seconds"]
    for options, key, aim in (
        ("conv=fsync", "dd", ", aim >= 0.9"),
        ("conv=fsync oflag=direct", "dd_direct", ""),
    ):
        theirs = figures[f"{key}_seconds"]
        print(
            f"| `dd {options}` | | | {theirs:.3f} ({size / theirs:.2f} GB/s; hpcrun {ours:.3f}, "
            f"{size / ours:.2f} GB/s) | {figures[f'write_over_{key}']:.2f} x as fast{aim} |"
        )
    read, restored = figures["read_seconds"], figures["restore_seconds"]
    print(
        f"| reading the file | | | {read:.3f} (hpcrun restores in {restored:.3f}) "
        f"| {figures['restore_over_read']:.2f} x the time, aim <= 1.3 |"
    )
    print(
        f"| restore from memory | | | {figures['memory_seconds']:.3f} (from disk without the cache "
        f"{figures['disk_seconds']:.3f}) | {figures['memory_over_disk']:.2f} x the time |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", default=".", help="a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=1.2, help="size of the state")
    parser.add_argument("--threads", type=int, default=1, help="cores that training keeps busy")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a training step")
    parser.add_argument("--window", type=float, default=2.0, help="seconds of steps after a save")
    parser.add_argument("--repeat", type=int, default=5, help="number of rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    figures = measure(arguments)
    if arguments.json:
        print(json.dumps(figures, indent=1))
    else:
        show(figures)
        show_snapshot(figures)


if __name__ == "__main__":
    main()
