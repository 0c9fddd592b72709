"""The built-in model on several ranks: the same training sharded, and the same bits after an interruption."""

import pytest
import torch
import torch.distributed as dist

from hpcrun.config import AMPConfig, override_layer, resolve
from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.config.training import FSDP
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks.language_model import LanguageModel
from hpcrun.tasks.llama import Llama
from hpcrun.train.build import build_trainer
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.parallel import fsdp
from hpcrun.train.setup import make_model
from hpcrun.train.step.trainer import DistributedAMPTrainer
from tests.support.on_ranks import ranks

SHAPE = LanguageModelShape(
    *(), layers=2, heads=4, kv_heads=2, width=32, vocabulary=512, tied=False, context=32,
    document_end=3, dropout=0.1,
)  # fmt: skip
WAYS = {
    "ddp": {"parallel": "ddp"},
    "buckets": {"parallel": "ddp", "bucket_mb": 0.05},
    "fsdp": {"parallel": "fsdp", "precision": "bf16"},
    "hybrid": {"parallel": "fsdp", "shard": "hybrid"},
}


def trainer(
    rank, parallel, precision="fp32", shard="full", reshard=True, bucket_mb=None, dropout=0.1
):
    """Return the trainer of a rank of two nodes."""
    count = dist.get_world_size()
    made = DistributedAMPTrainer(
        Llama(SHAPE.model_copy(update={"dropout": dropout}), seed=1),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        distributed=DistributedConfig(
            world_size=count, rank=rank, local_rank=rank % (count // 2), num_nodes=2,
            node_rank=rank // (count // 2), num_gpus_per_node=count // 2, bucket_mb=bucket_mb,
        ),
        amp=AMPConfig(dtype=precision),
        clip_norm=1.0,
        parallel=parallel,
        fsdp=FSDP(shard=shard, reshard_after_forward=reshard),
        device="cpu",
    )  # fmt: skip
    made.wrap_model()
    return made


def step(made, rank, number):
    """Take a step on this rank's two micro-batches of random tokens; return its loss."""
    drawn = torch.Generator().manual_seed(100 * number + rank)
    micro = MicroBatches(torch.randint(0, 512, (2, 33), generator=drawn) for _ in range(2))
    return made.training_step(micro, lambda model, seen: model(seen[:, :-1], seen[:, 1:])).loss


def state(made):
    model, optimizer = made.module.state_dict(), made.optimizer.state_dict()["state"]
    values = [*model.values(), *(one for part in optimizer.values() for one in part.values())]
    return [value.to_local() if hasattr(value, "to_local") else value for value in values]


@pytest.mark.parametrize("way", WAYS)
@ranks(4)
def test_an_interruption_changes_no_bit_of_a_packed_model(rank, tmp_path, monkeypatch, way):
    monkeypatch.setattr(fsdp, "LARGE", 512 * 32)
    calm = trainer(rank, **WAYS[way])
    torch.manual_seed(7 + rank)
    for number in range(4):
        if number == 2:
            assert calm.save_checkpoint(tmp_path, 2).ok
        step(calm, rank, number)
    again = trainer(rank, **WAYS[way])
    assert again.load_checkpoint(tmp_path).step == 2
    for number in (2, 3):
        step(again, rank, number)
    assert all(
        torch.equal(one, other) for one, other in zip(state(again), state(calm), strict=True)
    )


@pytest.mark.parametrize("way", ["fsdp", "hybrid"])
@ranks(4)
def test_gathered_weights_that_stay_change_no_bit(rank, monkeypatch, way):
    monkeypatch.setattr(fsdp, "LARGE", 512 * 32)
    ends = []
    for reshard in (True, False):
        made = trainer(rank, **WAYS[way], reshard=reshard)
        torch.manual_seed(7 + rank)
        for number in range(3):
            step(made, rank, number)
            # A validation between the steps.
            made.model(torch.zeros(1, 32, dtype=torch.long), torch.zeros(1, 32, dtype=torch.long))
            made.after_evaluation()
        ends.append(state(made))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


@ranks(2)
def test_each_rank_draws_its_shards_of_the_whole_model(rank):
    place = DistributedConfig(world_size=2, rank=rank, local_rank=rank, num_gpus_per_node=2)
    options = {"layers": 2, "heads": 2, "width": 24, "context": 8, "dropout": 0.1}
    keys = [f"model.{key}={value}" for key, value in options.items()]
    config = resolve([override_layer(["train.parallel=fsdp", "job.gpus=2", "seed=3", *keys])])
    task = LanguageModel(config)
    model, deferred = make_model(
        task, config, place, Ranks(rank, 2, dist.new_group(backend="gloo"))
    )
    assert deferred.drawn
    assert all(weight.is_meta for weight in model.parameters())
    with torch.no_grad():
        made = build_trainer(config, task, model, place, "fsdp", deferred, advance=lambda: None)
    whole = dict(task.build_model().named_parameters())
    for name, shard in made.module.named_parameters():
        assert torch.equal(shard.full_tensor(), whole[name]), name


class Wrapped(LanguageModel):
    """A task of a user whose model cannot draw its weights."""

    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 4))


@ranks(2)
def test_a_subclass_with_another_model_is_built_on_rank_0(rank):
    place = DistributedConfig(world_size=2, rank=rank, local_rank=rank, num_gpus_per_node=2)
    config = resolve([override_layer(["train.parallel=fsdp", "job.gpus=2"])])
    _, deferred = make_model(
        Wrapped(config), config, place, Ranks(rank, 2, dist.new_group(backend="gloo"))
    )
    assert not deferred.drawn
    assert bool(deferred.weights) is (rank == 0)
