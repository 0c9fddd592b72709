"""A state loads on any number of ranks, with DDP, FSDP2 or one process, and keeps its bits."""

import pytest
import torch
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpcrun.checkpoint.sharded.rank_file import StoreReader
from hpcrun.checkpoint.state.training import TrainingState
from hpcrun.checkpoint.state.tree import split
from tests.support.on_ranks import agreed, ranks

pytestmark = pytest.mark.slow


def build(kind, seed):
    """Return a training with odd sizes, so that shards are uneven and some ranks have empty shards."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 7), nn.GELU(), nn.Linear(7, 5), nn.GELU(), nn.Linear(5, 1))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        for layer in (*model[::2], model):
            fully_shard(layer)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 8))
    return TrainingState(model, optimizer, scheduler=schedule)


def train(state):
    for _ in range(2):
        state.model(torch.randn(8, 13)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.scheduler.step()


def digest(state):
    """Return the hash of the whole tensors, and the plain data; the same on all ranks. Collective."""
    skeleton, tensors = split(state.capture_shared({}))
    content = xxhash.xxh3_128()
    for name, value in sorted(tensors.items()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        content.update(f"{name} {whole.tolist()}".encode())
    return agreed(f"{content.hexdigest()} {skeleton['scheduler']}")


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
def test_a_state_keeps_its_bits_on_another_number_of_ranks(
    folder, world_size, phase, tmp_path, kinds, worlds
):
    state, engine = build(kinds[phase], phase), folder.engine(owner=f"7-{phase}")
    restored = engine.restore(state.template())
    if phase:
        found = state.restore(restored)
        assert (found.step, found.own) == (phase, None)
        assert found.notes[0].startswith(
            f"step {phase} was saved by {worlds[phase - 1]} ranks and is resumed by {world_size}"
        )
        assert digest(state) == (tmp_path / "digest").read_text()
    train(state)
    shared, own = state.capture({})
    outcome = engine.save(phase + 1, shared, own, {}, state.alike())
    assert outcome.ok, outcome.error
    (tmp_path / "digest").write_text(digest(state))
    # Every rank writes a part.
    files = [f"rank-{rank:05d}.bin" for rank in range(world_size)]
    tensors = StoreReader(engine.store, phase + 1).index.tensors.values()
    assert sorted({piece.place.file for tensor in tensors for piece in tensor.pieces}) == files
