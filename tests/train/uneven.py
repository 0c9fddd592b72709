"""Program of ``test_uneven.py``: three gloo ranks with batches that do not divide evenly.

``python -m tests.train.uneven FOLDER`` writes ``results-RANK.json`` into the folder.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # DDP would import it after the fork
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from hpcrun import Task
from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import AMPConfig
from hpcrun.train.data import order
from hpcrun.train.data.batches import training_steps
from hpcrun.train.evaluation.validate import validate
from hpcrun.train.evaluation.validation_data import ValidationData
from hpcrun.train.step.micro_batches import MicroBatchStep
from hpcrun.train.step.trainer import DistributedAMPTrainer
from tests.train.forks import fork_ranks
from tests.train.nccl_rules import nccl_rules
from tests.train.ranks import Pairs, digest, gathered, loss, small

WORLD = 3
SIZE, BATCH, SEED = 50, 16, 2
"""Four steps per epoch, the last step with two samples: no sample for the third rank."""


class Plain(Task):
    """A task in which every sample has the same weight."""

    def __init__(self):
        pass

    def build_model(self):
        return small()

    def train_dataset(self):
        return Pairs(SIZE)

    def loss(self, model, batch):
        return loss(model, batch)


class Tokens(Dataset):
    """Rows of six tokens. 0 to 6 tokens have a target."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        targets = torch.randint(5, (6,), generator=generator)
        targets[: index % 7] = -1
        return torch.randn(6, 6, generator=generator), targets


class Masked(Plain):
    """A task in which every token with a target has the same weight."""

    def build_model(self):
        return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))

    def train_dataset(self):
        return Tokens()

    def loss(self, model, batch):
        tokens, targets = batch
        return F.cross_entropy(
            model(tokens).float().flatten(0, 1), targets.flatten(), ignore_index=-1
        )

    def weight(self, batch):
        return (batch[1] >= 0).sum()


class Unmarked(Tokens):
    """The same task, but in the first short batch the sample of rank 0 has no target."""

    def __getitem__(self, index):
        tokens, targets = super().__getitem__(index)
        if index == order.samples(np.array([3 * BATCH]), SIZE, SEED)[0]:
            targets[:] = -1
        return tokens, targets


class Counted(Masked):
    """The same task, with weights as numbers instead of tensors."""

    def train_dataset(self):
        return Unmarked()

    def weight(self, batch):
        return float(super().weight(batch))


class Work:
    """A training run of some steps, on this rank of ``world_size``."""

    def __init__(
        self, rank, world_size=WORLD, *, task=None, uneven="across", batch_size=BATCH, accumulation=1,
        dropout=0.0, parallel="ddp", **options,
    ):  # fmt: skip
        self.task = task or Plain()
        self.shape = {
            "rank": rank,
            "world_size": world_size,
            "batch_size": batch_size,
            "accumulation": accumulation,
            "uneven": uneven,
        }
        torch.manual_seed(0)
        model = self.task.build_model()
        if dropout:
            model.insert(2, nn.Dropout(dropout))
        self.trainer = DistributedAMPTrainer(
            model,
            lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
            distributed=DistributedConfig(
                world_size=world_size, rank=rank, local_rank=rank, num_gpus_per_node=world_size
            ),
            device="cpu",
            parallel=parallel,
            clip_norm=0.5,
            **options,
        )
        self.trainer.wrap_model()
        torch.manual_seed(100 + rank)

    def steps(self, first, last):
        """Take the steps, and return the losses of this rank."""
        batches = training_steps(
            self.task.train_dataset(), range(first, last), seed=SEED, workers=0, pin_memory=False,
            **self.shape,
        )  # fmt: skip
        take = MicroBatchStep(self.trainer, self.task, batches.batching)
        return [take(step, next(batches)).loss for step in range(first, last)]

    def weights(self):
        return [whole(value) for value in self.trainer.module.state_dict().values()]

    def averages(self):
        average = self.trainer.average
        return [] if average is None else [whole(value) for value in average.tensors().values()]


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def compared(rank, steps=9, together=None, alone=None, **both):
    """Return losses and weights of three ranks and of one process on the same samples."""
    work = Work(rank, **{**both, **(together or {})})
    losses = torch.stack(work.steps(0, steps))
    dist.all_reduce(losses)
    one = Work(0, 1, **{**both, **(alone or {})})
    expected = torch.stack(one.steps(0, steps))
    return {
        "alike": len(set(gathered(digest(work.weights())))) == 1,
        "losses": [(losses / WORLD).tolist(), expected.tolist()],
        "weights": [
            torch.cat([value.flatten() for value in weights]).tolist()
            for weights in (work.weights(), one.weights())
        ],
    }


def a_batch_that_does_not_divide(rank):
    return compared(rank)


def nor_with_accumulation(rank):
    return compared(rank, together={"accumulation": 2})


def a_short_batch_padded(rank):
    return compared(rank, uneven="pad", together={"accumulation": 2})


def a_short_batch_joined(rank):
    return compared(rank, uneven="join", together={"accumulation": 2})


def a_short_batch_joined_in_fp16(rank):
    amp = AMPConfig(dtype="fp16", init_scale=64.0)
    return compared(rank, uneven="join", amp=amp)


def a_short_batch_dropped(rank):
    return compared(rank, uneven="drop")


def a_short_batch_padded_and_sharded(rank):
    return compared(rank, uneven="pad", together={"parallel": "fsdp"}, alone={"parallel": "single"})


def tokens(rank):
    return compared(rank, task=Masked(), uneven="pad", together={"accumulation": 2})


def tokens_joined(rank):
    return compared(rank, task=Masked(), uneven="join")


def tokens_joined_that_rank_0_has_none_of(rank):
    return compared(rank, task=Counted(), uneven="join")


def fewer_ranks_with_more_turns(rank):
    """Act as a run of 16 samples, at most 3 per micro-batch, that continues on one rank."""
    return compared(rank, together={"accumulation": 2}, alone={"accumulation": 6})


def resumed(rank, folder, **options):
    """Return if a stop right before the short batch changes a bit."""
    calm = Work(rank, dropout=0.3, **options)
    calm.steps(0, 9)
    broken = Work(rank, dropout=0.3, **options)
    broken.steps(0, 3)
    saved = broken.trainer.save_checkpoint(folder, 3)
    if not saved.ok:
        return saved.error
    again = Work(rank, dropout=0.3, **options)
    again.trainer.load_checkpoint(folder)
    again.steps(3, 9)
    return {
        "weights": digest(calm.weights()) == digest(again.weights()),
        "averages": digest(calm.averages()) == digest(again.averages()),
        "averaged": len(again.averages()),
    }


def resumed_on_fewer_ranks(rank, folder):
    """Return the losses of three ranks followed by one rank, and those of one rank for all steps."""
    three = Work(rank, accumulation=2, ema=0.9)
    three.steps(0, 4)
    saved = three.trainer.save_checkpoint(folder, 4)
    if not saved.ok:
        return saved.error
    if rank:
        return None
    after, always = Work(0, 1, accumulation=6, ema=0.9), Work(0, 1, ema=0.9)
    after.trainer.load_checkpoint(folder)
    always.steps(0, 4)
    return [
        [loss.item() for loss in work.steps(4, 9)]
        + [number for value in work.averages() for number in value.flatten().tolist()]
        for work in (after, always)
    ]


def validated(rank):
    """Return the loss over all tokens with averaged weights: on three ranks, and in one pass."""
    work = Work(rank, task=Masked(), ema=0.9)
    work.steps(0, 4)
    group = work.trainer.control_group()
    data = ValidationData(
        Tokens(), rank=rank, world_size=WORLD, batch_size=8, accumulation=1, limit=None, workers=1
    )
    found = [validate(work.trainer, work.task, data, group=group) for _ in range(2)]
    data.close()
    everything = default_collate([Tokens()[index] for index in range(SIZE)])
    with torch.no_grad():
        plain = work.task.loss(work.trainer.module, everything).item()
        with work.trainer.averaged():
            averaged = work.task.loss(work.trainer.module, everything).item()
    return {"found": found, "averaged": averaged, "plain": plain}


def averaged_in_shards(rank, folder):
    """Load the shards of averages that three ranks have saved, in one process and with DDP."""
    options = {"ema": 0.9, "uneven": "pad", "accumulation": 2}
    sharded = Work(rank, parallel="fsdp", **options)
    sharded.steps(0, 5)
    shards = sharded.trainer.average.tensors()
    saved = sharded.trainer.save_checkpoint(folder, 5)
    if not saved.ok:
        return saved.error
    copies = Work(rank, **options)
    copies.trainer.load_checkpoint(folder)
    whole = copies.trainer.average.tensors()
    straight = Work(rank, **options)
    straight.steps(0, 5)
    own = straight.trainer.average.tensors()
    return {
        "sharded": all(isinstance(value, DTensor) for value in shards.values()),
        "same": all(torch.equal(shards[name].full_tensor(), whole[name]) for name in whole),
        "close": all(torch.allclose(own[name], whole[name], atol=1e-6) for name in whole),
    }


COMPARED = [
    a_batch_that_does_not_divide,
    nor_with_accumulation,
    a_short_batch_padded,
    a_short_batch_joined,
    a_short_batch_joined_in_fp16,
    a_short_batch_dropped,
    a_short_batch_padded_and_sharded,
    tokens,
    tokens_joined,
    tokens_joined_that_rank_0_has_none_of,
    fewer_ranks_with_more_turns,
]

RESUMED = {
    "pad": {"uneven": "pad", "accumulation": 2},
    "join": {"uneven": "join", "ema": 0.9},
    "join in fp16": {"uneven": "join", "amp": AMPConfig(dtype="fp16", init_scale=64.0)},
    "sharded": {"uneven": "pad", "parallel": "fsdp", "ema": 0.9},
}


def play(rank, folder):
    """Run all scenarios and write the results."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=300)
    )
    with nccl_rules():
        results = {scenario.__name__: scenario(rank) for scenario in COMPARED}
        for name, options in RESUMED.items():
            results[f"resumed-{name}"] = resumed(rank, folder / name, **options)
        results["validated"] = validated(rank)
        results["fewer"] = resumed_on_fewer_ranks(rank, folder / "fewer")
        results["averaged"] = averaged_in_shards(rank, folder / "averaged")
    (folder / f"results-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main(folder):
    """Run everything; the exit status is 0 only if every rank succeeds."""
    return int(any(fork_ranks(WORLD, lambda rank: play(rank, folder))))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
