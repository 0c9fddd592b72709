"""A state resumes on any number of ranks, with DDP, FSDP2 or one process, without a trace in training."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.rank_file import StoreReader
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
from hpcrun.ranks.collective import Ranks
from hpcrun.train.data.batches import training_steps
from tests.on_ranks import gathered, ranks

pytestmark = pytest.mark.slow

SAMPLES, BATCH, STEPS = 40, 16, 16


class Numbers(Dataset):
    """A data set: item ``i`` is a function of ``i``, and contains ``i``."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(13, generator=generator), torch.tensor(index)


def build(kind, seed):
    """Return a model with odd sizes, so that shards are uneven and some ranks have empty shards."""
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


@dataclass
class Trained:
    """What a rank has seen: the mean losses of all ranks, its own samples by step, and the last weights."""

    losses: list[float] = field(default_factory=list)
    samples: dict[int, list[int]] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)


class Training:
    """A model of a kind of parallelism on this rank of ``world``."""

    def __init__(self, kind, rank, world, seed=1000):
        self.rank, self.world = rank, world
        self.model, self.optimizer, self.schedule = build(kind, seed)
        if kind == "ddp":
            # DDP's final bucket layout before the first measured step; see DistributedAMPTrainer.
            self.model(torch.rand(2, 13)).sum().backward()
            self.optimizer.zero_grad()

    def take(self, steps, after=lambda _: None):
        """Train, and call ``after`` each step."""
        trained = Trained()
        batches = training_steps(
            Numbers(), steps, rank=self.rank, world_size=self.world, batch_size=BATCH,
            accumulation=1, seed=3, workers=0, pin_memory=False,
        )  # fmt: skip
        for step in steps:
            ((values, indices),) = next(batches)
            trained.samples[step] = indices.tolist()
            loss = (self.model(values).squeeze(-1) - values.sum(-1)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            mean = loss.detach() / self.world
            if self.world > 1:
                dist.all_reduce(mean)
            trained.losses.append(mean.item())
            after(step)
        trained.weights = {name: whole(value) for name, value in self.shared()["model"].items()}
        return trained

    def shared(self, **extra):
        return capture_shared(self.model, self.optimizer, scheduler=self.schedule, extra=extra)


def part(folder, kind, rank, world, until):
    """Restore, train to step ``until`` and save; return the restored state and what this rank has seen."""
    training = Training(kind, rank, world, seed=world if folder.exists() else 1000)
    store = CheckpointStore(folder, f"7-{until}")
    engine = CheckpointEngine(
        store,
        Ranks(rank, world, dist.new_group(backend="gloo") if world > 1 else None),
        still_mine=lambda: None,
        after_commit=pruning(store, Retention(keep=2)),
    )
    restored = engine.restore(template(training.model, training.optimizer))
    if restored:
        apply_shared(
            restored.shared, training.model, training.optimizer, scheduler=training.schedule
        )
        if restored.own is not None:
            apply_rank(restored.own)

    def save_early(step):
        if step == until - 3:
            engine.start(step + 1, training.shared(), capture_rank(), {}, alike(training.model))

    trained = training.take(range(restored.step if restored else 0, until), save_early)
    shared = training.shared(seen=until * BATCH)
    outcome = engine.save(until, shared, capture_rank(), {}, alike(training.model))
    assert outcome.ok, outcome.error
    return restored, trained


def require_every_rank_wrote_a_file(folder, world, step):
    """Check that replicated tensors are distributed among the ranks' files."""
    store = CheckpointStore(folder, f"7-{step}")
    files = [f"rank-{rank:05d}.bin" for rank in range(world)]
    names = sorted(record.name for record in store.manifest(step).files)
    assert names == ["index.json", *files]
    tensors = StoreReader(store, step).index.tensors.values()
    assert sorted({piece.place.file for tensor in tensors for piece in tensor.pieces}) == files


def require_undisturbed(trained, start, until):
    """Compare losses and samples with an undisturbed training of one rank. Collective."""
    alone = Training("single", 0, 1).take(range(until))
    assert trained.losses == pytest.approx(alone.losses[start:], rel=1e-4)
    seen = gathered(trained.samples)
    for step in range(start, until):
        batch = [index for samples in seen for index in samples[step]]
        assert len(batch) == BATCH
        assert sorted(batch) == sorted(alone.samples[step])
    if until == STEPS:
        # Batches cross epochs: count whole epochs over the stream in the order of samples.
        counted = Counter(index for batch in alone.samples.values() for index in batch)
        least, over = divmod(STEPS * BATCH, SAMPLES)
        assert set(counted) == set(range(SAMPLES))
        assert sorted(counted.values()) == [least] * (SAMPLES - over) + [least + 1] * over


@pytest.mark.parametrize(
    ("kinds", "worlds"),
    [
        pytest.param(["ddp"] * 4, (8, 4, 2, 8), marks=ranks(8, 4, 2, 8), id="8 4 2 8"),
        pytest.param(
            ["ddp", "fsdp", "single", "fsdp"],
            (4, 2, 1, 4),
            marks=ranks(4, 2, 1, 4),
            id="ddp fsdp single",
        ),
    ],
)
def test_a_resume_on_another_number_of_ranks_leaves_no_trace(
    rank, world_size, phase, tmp_path, kinds, worlds
):
    start, until = 4 * phase, 4 * phase + 4
    folder = tmp_path / "checkpoints"
    restored, trained = part(folder, kinds[phase], rank, world_size, until)
    assert (restored.step if restored else 0) == start
    if restored:
        assert restored.own is None
        assert restored.notes[0].startswith(
            f"step {start} was saved by {worlds[phase - 1]} ranks and is resumed by {world_size}"
        )
    require_undisturbed(trained, start, until)
    require_every_rank_wrote_a_file(folder, world_size, until)


@ranks(4, 4)
def test_equal_numbers_of_ranks_give_equal_bits_also_when_sharded(rank, phase, tmp_path):
    start, until = ((0, 5), (5, STEPS))[phase]
    folder = tmp_path / "checkpoints"
    restored, trained = part(folder, "fsdp", rank, 4, until)
    require_undisturbed(trained, start, until)
    require_every_rank_wrote_a_file(folder, 4, until)
    calm = Training("fsdp", rank, 4).take(range(until))
    assert trained.weights == calm.weights
    assert trained.losses == calm.losses[start:]
    if phase == 1:
        assert restored.step == start
        assert restored.own is not None
        assert list(restored.notes) == []
