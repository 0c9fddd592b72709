#!/usr/bin/env python3
"""Growth of throughput from one rank to two on this machine: weak and strong scaling, for each parallelism.

Whole runs of hpcrun's loop train a small GPT on the CPU over gloo, each rank bound to one core
with one thread. Weak: twice the batch on twice the ranks; strong: the same batch. A figure is
the throughput relative to one rank in the same round, the median over rounds. Each round has all runs in
turn, so that other work on the machine affects all of them. Two ranks on two cores share memory and
caches: the last row, two independent single ranks, is the limit of the machine.

    tools/bench/scaling.py --rounds 3     # about five minutes per round
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import read_lines

ROOT = Path(__file__).resolve().parents[2]
COMMON = [
    "task=hpcrun.tasks.language_model:LanguageModel", "job.cpu=true",
    "train.log_every=5", "checkpoint.every=0",
    "data.validation_fraction=0.01", "train.timeout=120", "optim.warmup_steps=5",
]  # fmt: skip
WARM_LINES = 2
"""Logged lines dropped at the start: buckets settle, caches fill."""


@dataclass(frozen=True)
class Way:
    """A row of the table: a name and its overrides."""

    name: str
    overrides: tuple[str, ...] = ()


WAYS = [
    Way("ddp", ("train.parallel=ddp",)),
    Way("fsdp", ("train.parallel=fsdp",)),
]


@dataclass(frozen=True)
class Size:
    """The trained model: the GPT's width, layers and context, samples per rank, and steps per run."""

    width: int
    layers: int
    context: int
    batch: int
    steps: int


def train(folder: Path, size: Size, ranks: int, batch: int, overrides: tuple[str, ...]) -> float:
    """Train and return the median tokens per second of all logged lines after the warm-up."""
    return finish(start(folder, size, ranks, batch, overrides, list(range(ranks))))


@dataclass(frozen=True)
class Started:
    """Started ranks and their run."""

    run: RunDirectory
    ranks: list["subprocess.Popen[bytes]"]


def start(
    folder: Path, size: Size, ranks: int, batch: int, overrides: tuple[str, ...], cores: list[int]
) -> Started:
    """Start one process per rank, each bound to a core."""
    wanted = [
        *COMMON, f"job.gpus={ranks}", f"train.batch_size={batch}", f"train.steps={size.steps}",
        f"model.width={size.width}", f"model.layers={size.layers}",
        f"model.context={size.context}", *overrides,
    ]  # fmt: skip
    number = len(list(folder.iterdir()))
    config = to_yaml(resolve([override_layer(wanted)]))
    run = create(folder / f"run-{number}", config, {"folder": str(folder)})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    allowed = sorted(os.sched_getaffinity(0))
    for rank in range(ranks):
        environ = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        core = allowed[cores[rank]]
        processes.append(
            subprocess.Popen(
                ["taskset", "-c", str(core), sys.executable, "-m", "hpcrun.worker", str(run.path)],
                env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    return Started(run, processes)


def finish(started: Started) -> float:
    """Wait for the end; return the median tokens per second."""
    said = [process.communicate()[0] for process in started.ranks]
    if any(process.returncode for process in started.ranks):
        raise SystemExit(f"scaling: a run failed:\n{said[0].decode(errors='replace')[-3000:]}")
    rates = [
        float(line["tokens_per_second"])
        for line in read_lines(started.run.metrics)
        if "tokens_per_second" in line
    ]
    return statistics.median(rates[WARM_LINES:])


def two_alone(folder: Path, size: Size) -> float:
    """Return the tokens per second of two independent single ranks at the same time."""
    both = [start(folder, size, 1, size.batch, (), [core]) for core in (0, 1)]
    return sum(finish(one) for one in both)


def measure(size: Size, rounds: int, ways: list[Way]) -> dict[str, dict[str, float]]:
    """Return speed-ups from one rank to two: name -> weak and strong, the medians over rounds."""
    seen: dict[str, dict[str, list[float]]] = {
        name: {"weak": [], "strong": []}
        for name in [*(way.name for way in ways), "two independent ranks"]
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number in range(rounds):
            alone = train(folder, size, 1, size.batch, ())
            for way in ways:
                weak = train(folder, size, 2, 2 * size.batch, way.overrides)
                strong = train(folder, size, 2, size.batch, way.overrides)
                seen[way.name]["weak"].append(weak / alone)
                seen[way.name]["strong"].append(strong / alone)
            seen["two independent ranks"]["weak"].append(two_alone(folder, size) / alone)
            print(f"round {number + 1} of {rounds} is done", file=sys.stderr, flush=True)
    return {
        name: {kind: statistics.median(values) for kind, values in kinds.items() if values}
        for name, kinds in seen.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (default 3)")
    parser.add_argument("--width", type=int, default=256, help="width of the GPT (default 256)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the GPT (default 4)")
    parser.add_argument("--context", type=int, default=128, help="bytes per sample (default 128)")
    parser.add_argument("--batch", type=int, default=16, help="samples per rank (default 16)")
    parser.add_argument("--steps", type=int, default=40, help="steps per run (default 40)")
    parser.add_argument("--only", metavar="WAY", help="only variants with this text in their name")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    wanted = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two ranks need two cores, and this process may use one")
    size = Size(wanted.width, wanted.layers, wanted.context, wanted.batch, wanted.steps)
    ways = [way for way in WAYS if wanted.only is None or wanted.only in way.name]
    results = measure(size, wanted.rounds, ways)
    if wanted.json:
        print(json.dumps(results, indent=2))
    else:
        print("| 1 -> 2 ranks | weak | strong |")
        print("|---|---|---|")
        for name, kinds in results.items():
            cells = [f"{kinds[kind]:.2f} x" if kind in kinds else "" for kind in ("weak", "strong")]
            print(f"| {name} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
