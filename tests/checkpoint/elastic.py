"""Program of ``test_elastic.py``: a sequence of training phases, each resuming from the previous phase.

Each phase is a kind of parallelism, a number of ranks and the step to train up to. torch is imported
once and the ranks are forked. ``python -m tests.checkpoint.elastic FOLDER`` writes ``results.json``.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.read import StoreReader
from hpcrun.checkpoint.state.capture import (
    alike,
    apply_rank,
    apply_shared,
    capture_rank,
    capture_shared,
    template,
)
from hpcrun.checkpoint.storage.retention import Retention, pruning
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.control.collective import Ranks
from hpcrun.train.data.batches import training_steps
from tests.train.forks import fork_ranks

SAMPLES, BATCH = 40, 16

SCENARIOS = {
    "undisturbed": [("ddp", 8, 16)],
    "8 4 2 8": [("ddp", 8, 4), ("ddp", 4, 8), ("ddp", 2, 12), ("ddp", 8, 16)],
    "ddp fsdp single": [("ddp", 4, 4), ("fsdp", 2, 8), ("single", 1, 12), ("fsdp", 4, 16)],
    "fsdp": [("fsdp", 4, 16)],
    "fsdp again": [("fsdp", 4, 5), ("fsdp", 4, 16)],
}


class Numbers(Dataset):
    """A data set: item ``i`` is a function of ``i``, and contains ``i``."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(13, generator=generator), torch.tensor(index)


def build(kind, seed):
    """A model with odd sizes, so that shards are uneven and some ranks have empty shards."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 7), nn.GELU(), nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 1))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
    return model, optimizer, schedule


def whole(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().double().flatten().tolist()


def phase(folder, kind, rank, world, until):
    """Restore, train to ``until``, save; return losses, samples by step, notes, weights."""
    model, optimizer, schedule = build(kind, seed=world)
    if not (folder / "checkpoints").exists():
        model, optimizer, schedule = build(kind, seed=1000)
    if kind == "ddp":
        # DDP's final bucket layout before the first measured step; see DistributedAMPTrainer.
        model(torch.rand(2, 13)).sum().backward()
        optimizer.zero_grad()
    store = CheckpointStore(folder / "checkpoints", f"7-{until}")
    engine = CheckpointEngine(
        store,
        Ranks(rank, world),
        still_mine=lambda: None,
        after_commit=pruning(store, Retention(keep=2)),
    )
    restored = engine.restore(template(model, optimizer))
    start = restored.step if restored else 0
    if restored:
        apply_shared(restored.shared, model, optimizer, scheduler=schedule)
        if restored.own is not None:
            apply_rank(restored.own)
    losses, samples = [], {}
    steps = range(start, until)
    batches = training_steps(
        Numbers(), steps, rank=rank, world_size=world, batch_size=BATCH, accumulation=1,
        seed=3, workers=0, pin_memory=False,
    )  # fmt: skip
    for step in steps:
        ((values, indices),) = next(batches)
        samples[step] = indices.tolist()
        loss = (model(values).squeeze(-1) - values.sum(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
        if step == until - 3:
            shared = capture_shared(model, optimizer, scheduler=schedule, extra={})
            engine.start(step + 1, shared, capture_rank(), {}, alike(model))
    shared = capture_shared(model, optimizer, scheduler=schedule, extra={"seen": until * BATCH})
    outcome = engine.save(until, shared, capture_rank(), {}, alike(model))
    assert outcome.ok, outcome.error
    manifest, index = store.manifest(until), StoreReader(store, until).index
    return {
        "start": start,
        "own": restored is not None and restored.own is not None,
        "notes": list(restored.notes) if restored else [],
        "losses": losses,
        "samples": samples,
        "weights": {name: whole(value) for name, value in shared["model"].items()},
        "files": sorted(record.name for record in manifest.files),
        "writers": sorted({p.place.file for e in index.tensors.values() for p in e.pieces}),
    }


def run_rank(folder, number, kind, rank, world, until):
    torch.set_num_threads(1)
    if world > 1:
        store = dist.FileStore(str(folder / f"rendezvous-{number}"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300)
        )
    result = phase(folder, kind, rank, world, until)
    (folder / f"phase-{number}-{rank}.json").write_text(json.dumps(result))


def main(folder):
    results = {}
    for name, phases in SCENARIOS.items():
        place = folder / name.replace(" ", "-")
        place.mkdir()
        results[name] = []
        for number, (kind, world, until) in enumerate(phases):

            def rank_of(rank, place=place, number=number, kind=kind, world=world, until=until):
                run_rank(place, number, kind, rank, world, until)

            if any(fork_ranks(world, rank_of)):
                return 1
            results[name].append(
                [
                    json.loads((place / f"phase-{number}-{rank}.json").read_text())
                    for rank in range(world)
                ]
            )
    (folder / "results.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
