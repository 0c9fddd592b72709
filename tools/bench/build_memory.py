#!/usr/bin/env python3
"""Peak host memory of a rank while a GPT is built and sharded with FSDP.

- deferred: only rank 0 builds the model with weights, and sends them after sharding
- normal: every rank builds the whole model

The builds are those of a run. Each rank is a process on the CPU, connected by gloo. The peak is what the
kernel counts for the process (VmHWM) above its memory before the build, so it includes the buffers of the
collectives. With --fake-world N one process acts as rank 0 of N ranks: its collectives move no data, and its
weights are real.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from hpcrun.config import Config, override_layer, resolve
from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks.llama import Llama
from hpcrun.train.build import build_trainer
from hpcrun.train.parallel.process_group import control_ranks
from hpcrun.train.setup import make_model
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import Task
from tests.support.training.forks import fork_ranks

_MIB = 1 << 20


class _Shaped(Task):
    """A GPT of the given shape, without data."""

    def __init__(self, config: Config, shape: LanguageModelShape) -> None:
        super().__init__(config)
        self._shape = shape

    def build_model(self) -> Llama:
        return Llama(self._shape)

    def train_dataset(self) -> Any:
        raise NotImplementedError("no data")

    def loss(self, model: Any, batch: Any) -> Any:
        raise NotImplementedError("no steps")


def main() -> int:
    """Measure and print a table."""
    options = _options()
    shape = LanguageModelShape(width=options.width, layers=options.layers, heads=8, context=128)
    with FakeTensorMode():
        model = Llama(shape)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        largest = max(parameter.nbytes for parameter in model.parameters())
        block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    world = options.fake_world or options.ranks
    print(
        f"{whole / 4e9:.3g} G parameters on {world} ranks: whole {whole / _MIB:.0f} MiB, "
        f"shard {whole / world / _MIB:.0f}, block {block / _MIB:.0f}, largest parameter {largest / _MIB:.0f}"
    )
    print(f"{'build':<10}{'rank 0, MiB':>10}{'other ranks, MiB':>20}{'seconds':>10}")
    for name in ("deferred",) if options.fake_world else ("deferred", "normal"):
        with tempfile.TemporaryDirectory() as folder:
            ranks = 1 if options.fake_world else options.ranks
            codes = fork_ranks(
                ranks,
                lambda rank, name=name, at=Path(folder): _measure(rank, name, at, options, shape),
            )
            if any(codes):
                return 1
            found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
        first, others = found[0]["peak"], max((one["peak"] for one in found[1:]), default=0)
        seconds = max(one["seconds"] for one in found)
        print(f"{name:<10}{first / _MIB:>10.0f}{others / _MIB:>20.0f}{seconds:>10.1f}", flush=True)
    return 0


def _measure(
    rank: int, name: str, folder: Path, options: argparse.Namespace, shape: LanguageModelShape
) -> None:
    torch.set_num_threads(1)
    _join(rank, folder, options)
    world = dist.get_world_size()
    place = DistributedConfig(world_size=world, rank=rank, local_rank=rank, num_gpus_per_node=world)
    # Loads what the first sharding imports.
    build(place, LanguageModelShape(width=16, layers=1, heads=1, context=8), name)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # Resets VmHWM.
    before, start = _status("VmRSS"), time.perf_counter()
    trainer = build(place, shape, name)
    seconds, peak = time.perf_counter() - start, _status("VmHWM") - before
    assert not any(parameter.is_meta for parameter in trainer.module.parameters())
    (folder / f"{rank}.json").write_text(json.dumps({"peak": peak, "seconds": seconds}))


def _join(rank: int, folder: Path, options: argparse.Namespace) -> None:
    if options.fake_world:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.fake_world)  # type: ignore[no-untyped-call]
        # A group of gloo would wait for the other ranks.
        trainers: Any = DistributedAMPTrainer
        trainers.control_ranks = lambda _: Ranks()
        return
    store: Any = dist.FileStore(str(folder / "rendezvous"), options.ranks)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=options.ranks, timeout=timedelta(seconds=600)
    )


def build(place: DistributedConfig, shape: LanguageModelShape, name: str) -> DistributedAMPTrainer:
    """Build and shard the model as a run does."""
    settings = ["optim.name=sgd", "optim.momentum=0", "train.parallel=fsdp"]
    config = resolve([override_layer([*settings, f"fsdp.deferred_init={name != 'normal'}"])])
    task = _Shaped(config, shape)
    ranks = Ranks() if _is_fake() else control_ranks(place)
    model, deferred = make_model(task, config, place, ranks)
    assert (deferred is not None) == (name != "normal")
    return build_trainer(config, task, model, place, "fsdp", deferred)


def _is_fake() -> bool:
    return str(dist.get_backend()) == "fake"


def _status(key: str) -> int:
    """Return an entry of the process's status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4, help="processes of the measurement")
    parser.add_argument("--width", type=int, default=2048, help="width of the GPT")
    parser.add_argument("--layers", type=int, default=10, help="layers of the GPT")
    parser.add_argument(
        "--fake-world", type=int, default=0, help="act as rank 0 of so many ranks, deferred only"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
