"""Program of ``test_ranks.py``: gloo ranks run all scenarios.

``python -m tests.train.ranks FOLDER`` writes ``results-WORLD-RANK.json`` into the folder.
"""

import copy
import hashlib
import json
import random
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # DDP would import it after the fork
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import AMPConfig
from hpcrun.errors import UserError
from hpcrun.train.data.batches import training_steps
from hpcrun.train.evaluation.validate import validate
from hpcrun.train.evaluation.validation_data import ValidationData
from hpcrun.train.parallel import process_group
from hpcrun.train.parallel.collective import together
from hpcrun.train.step.trainer import DistributedAMPTrainer
from tests.train.forks import fork_ranks
from tests.train.nccl_rules import nccl_rules


class Pairs(torch.utils.data.Dataset):
    """A data set of six inputs and a target, each computed from its index."""

    def __init__(self, size=50):
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(size, 6, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.inputs[index].sin().sum()


class Mean:
    """A task with the methods that validation needs."""

    def loss(self, model, batch):
        return loss(model, batch)

    def weight(self, batch):
        return None


def loss(model, batch):
    inputs, targets = batch
    return (model(inputs).squeeze(-1).float() - targets).square().mean()


def small():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def noisy():
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 1)
    )


def large():
    """A model with several gradient buckets (the first holds 1 MiB), ready in another order than declared."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.middle, self.first = (
                nn.Linear(512, 1),
                nn.Linear(512, 512),
                nn.Linear(6, 512),
            )
            self.extra = nn.Linear(512, 512)

        def forward(self, inputs):
            return self.last(self.extra(self.middle(self.first(inputs).tanh()).tanh()).tanh())

    return Backwards()


def digest(values):
    joined = b"".join(value.detach().contiguous().numpy().tobytes() for value in values)
    return hashlib.sha256(joined).hexdigest()


class Ranks:
    """A rank's view: its number, the number of ranks, and the folder of the scenario."""

    def __init__(self, rank, world_size, folder):
        self.rank, self.world_size, self.folder = rank, world_size, folder

    def trainer(self, make=small, *, lr=0.05, adam=False, described=None, **options):
        """Return a wrapped trainer, with the same weights on all ranks."""
        torch.manual_seed(0)
        kind = torch.optim.AdamW if adam else torch.optim.SGD
        trainer = DistributedAMPTrainer(
            make(),
            lambda model: kind(model.parameters(), lr=lr),
            distributed=DistributedConfig(
                world_size=self.world_size,
                rank=self.rank,
                local_rank=self.rank,
                num_gpus_per_node=self.world_size,
                **(described or {}),
            ),
            device="cpu",
            **options,
        )
        trainer.wrap_model()
        return trainer

    def batches(self, first, last, *, batch_size=16, accumulation=1):
        """Return this rank's micro-batches of the steps, as a list."""
        return list(
            training_steps(
                Pairs(),
                range(first, last),
                rank=self.rank,
                world_size=self.world_size,
                batch_size=batch_size,
                accumulation=accumulation,
                seed=2,
                workers=0,
                pin_memory=False,
            )
        )

    def mean(self, value):
        """Return a tensor's mean over ranks."""
        value = value.detach().clone()
        dist.all_reduce(value)
        return (value / self.world_size).tolist()


def values(trainer):
    return [value.tolist() for value in trainer.module.state_dict().values()]


def twenty_steps(ranks):
    found = {}
    for name, accumulation, amp in (
        ("plain", 1, AMPConfig()),
        ("accumulated", 4, AMPConfig()),
        ("fp16", 1, AMPConfig(dtype="fp16", init_scale=256.0)),
        ("bf16", 1, AMPConfig(dtype="bf16")),
    ):
        trainer = ranks.trainer(adam=True, lr=0.01, clip_norm=1.0, amp=amp)
        results = [
            trainer.training_step(batches, loss)
            for batches in ranks.batches(0, 20, accumulation=accumulation)
        ]
        found[name] = {
            "losses": [ranks.mean(result.loss) for result in results],
            "norms": [result.gradient_norm.item() for result in results],
            "weights": values(trainer),
        }
    return found


def communication(ranks):
    """Return the number of hook calls per step, with one micro-batch and with four."""
    counts = {}
    for accumulation in (1, 4):
        trainer = ranks.trainer(large)
        calls = []

        def counted(group, bucket, calls=calls):
            calls.append(bucket.index())
            return allreduce_hook(group, bucket)

        trainer.model.register_comm_hook(None, counted)
        data = ranks.batches(0, 3, accumulation=accumulation)
        trainer.training_step(data[0], loss)
        after_first = len(calls)
        trainer.training_step(data[1], loss)
        counts[str(accumulation)] = len(calls) - after_first
    return counts


def overflow_on_one_rank(ranks):
    trainer = ranks.trainer(
        amp=AMPConfig(dtype="fp16", init_scale=64.0),
        clip_norm=1.0,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s),
    )
    before = values(trainer)
    first, second = ranks.batches(0, 2)
    inputs, targets = first[0]
    if ranks.rank == 1:
        targets = torch.full_like(targets, torch.inf)
    skipped = trainer.training_step([(inputs, targets)], loss)
    untouched = values(trainer) == before
    taken = trainer.training_step(second, loss)
    return {
        "skipped": [skipped.skipped, taken.skipped],
        "untouched": untouched,
        "scale": trainer.scaler.get_scale(),
        "rates": [
            skipped.learning_rate,
            taken.learning_rate,
            trainer.optimizer.param_groups[0]["lr"],
        ],
        "digest": digest(trainer.module.state_dict().values()),
        "finite": all(torch.isfinite(p).all().item() for p in trainer.module.parameters()),
    }


def settling_leaves_no_trace(ranks):
    """Train two ranks against plain DDP: with two numbers to add, the bucket layout cannot matter."""
    trainer = ranks.trainer(noisy)
    torch.manual_seed(0)
    plain = DistributedDataParallel(noisy())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    data = ranks.batches(0, 3)

    def seeded():
        torch.manual_seed(ranks.rank)
        random.seed(ranks.rank)

    seeded()
    for step in data:
        trainer.training_step(step, loss)
    ours = digest(trainer.module.state_dict().values()), torch.rand(1).item(), random.random()
    seeded()
    for (batch,) in data:
        loss(plain, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return ours == (
        digest(plain.module.state_dict().values()),
        torch.rand(1).item(),
        random.random(),
    )


def resumed(ranks, make, *, settle=True, described=None, accumulation=1):
    """Return if six steps equal three steps, a save, and three steps in a new trainer, bit by bit."""

    def begin():
        trainer = ranks.trainer(make, adam=True, clip_norm=1.0, described=described)
        trainer._buckets_final = not settle
        return trainer

    data = ranks.batches(0, 6, accumulation=accumulation)
    folder = ranks.folder / f"checkpoints-{settle}"
    calm = begin()
    torch.manual_seed(100 + ranks.rank)
    for number, step in enumerate(data):
        calm.training_step(step, loss)
        if number == 2:
            saved = calm.save_checkpoint(folder, 3)
            if not saved.ok:
                return saved.error
    again = begin()
    again.load_checkpoint(folder)
    for step in data[3:]:
        again.training_step(step, loss)
    return digest(calm.module.state_dict().values()) == digest(again.module.state_dict().values())


def resumed_with_several_buckets(ranks):
    return resumed(ranks, large)


def resumed_without_settling(ranks):
    return resumed(ranks, large, settle=False)


def resumed_while_accumulating(ranks):
    return resumed(ranks, noisy, accumulation=2)


def resumed_with_unused_parameters(ranks):
    class HalfUsed(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = large(), nn.Linear(3, 3)

        def forward(self, inputs):
            return self.used(inputs)

    return resumed(ranks, HalfUsed, described={"find_unused_parameters": True})


def resumed_with_buffers_of_its_own(ranks):
    """Check that buffers that DDP does not broadcast are part of each rank's state."""

    class Drifting(nn.Module):
        """A model with an output that depends on a running mean of this rank's samples."""

        def __init__(self):
            super().__init__()
            self.body = small()
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, inputs):
            if self.training:
                self.seen = 0.9 * self.seen + 0.1 * inputs.mean(0)
            return self.body(inputs - self.seen)

    return resumed(ranks, Drifting, described={"broadcast_buffers": False})


def validation(ranks):
    """Validate fifty samples, seven and two on four ranks, and compare with a single rank."""
    trainer = ranks.trainer(noisy)
    trainer.module[3].eval()
    for step in ranks.batches(0, 2):
        trainer.training_step(step, loss)
    group = trainer.control_group()
    own_buffers = digest(trainer.module.buffers())
    found = {"differ": len(set(gathered(own_buffers))) > 1}
    reference = copy.deepcopy(trainer.module)
    for buffer in reference.buffers():
        dist.broadcast(buffer, src=0)
    reference.eval()
    for size in (50, 7, 2):
        chosen = ValidationData(
            Pairs(size), rank=ranks.rank, world_size=ranks.world_size, batch_size=8,
            accumulation=2, limit=None,
        )  # fmt: skip
        value = validate(trainer, Mean(), chosen, group=group)
        data = Pairs(size)
        with torch.no_grad():
            every = [loss(reference, (x[None], y[None])) for x, y in (data[i] for i in range(size))]
        found[str(size)] = [value, torch.stack(every).mean().item()]
    found["kept"] = digest(trainer.module.buffers()) == own_buffers
    found["modes"] = [part.training for part in trainer.module]
    return found


class Bank(nn.Module):
    """A model with buffers in a layout and a dtype that NCCL refuses, different on each rank."""

    def __init__(self, rank, dtype):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("bank", torch.arange(18.0).reshape(3, 6).T + rank)
        self.register_buffer("table", torch.arange(6, dtype=dtype) + rank)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return (inputs + self.table) @ self.bank


def buffers_that_nccl_refuses(ranks):
    """Return each rank's loss of a validation, and its buffers, with DDP and FSDP."""
    found = {}
    # DDP itself sends int16 buffers as they are.
    for parallel, dtype in (("ddp", torch.int32), ("fsdp", torch.int16)):
        trainer = ranks.trainer(partial(Bank, ranks.rank, dtype), parallel=parallel)
        task = Mean()
        task.loss = lambda model, batch: model(batch[0]).square().mean()
        trainer.training_step(ranks.batches(0, 1)[0], task.loss)
        value = validate(
            trainer, task, [(ranks.batches(0, 1)[0][0], 4)], group=dist.new_group(backend="gloo")
        )
        buffers = [buffer.tolist() for buffer in trainer.module.buffers()]
        found[parallel] = [buffers, value, trainer.module.bank.stride()]
    return found


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def failing_together(ranks):
    group = dist.new_group(backend="gloo")

    def attempt(compute):
        try:
            return together(compute, rank=ranks.rank, group=group)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def refuse_on(*chosen):
        def compute():
            if ranks.rank in chosen:
                raise UserError(f"no data on rank {ranks.rank}")
            return "fine"

        return compute

    def stumble_on_2():
        if ranks.rank == 2:
            raise ZeroDivisionError("a defect")
        return "fine"

    return {
        "nobody": attempt(refuse_on()),
        "rank 0": attempt(refuse_on(0, 1)),
        "rank 3": attempt(refuse_on(3)),
        "a defect": attempt(stumble_on_2),
    }


def questions(ranks):
    return [
        process_group.get_rank(),
        process_group.get_world_size(),
        process_group.is_main_process(),
        ranks.trainer().is_distributed,
        ranks.trainer().is_main_process,
    ]


SCENARIOS = {
    2: [
        twenty_steps,
        communication,
        overflow_on_one_rank,
        settling_leaves_no_trace,
        resumed_while_accumulating,
    ],
    4: [
        twenty_steps,
        resumed_with_several_buckets,
        resumed_without_settling,
        resumed_with_unused_parameters,
        resumed_with_buffers_of_its_own,
        validation,
        buffers_that_nccl_refuses,
        failing_together,
        questions,
    ],
    1: [twenty_steps],
}


def play(world_size, rank, folder):
    """Run the scenarios of this world size and write the results."""
    torch.set_num_threads(1)
    # A group even for a single rank: the scenarios average over ranks.
    store = dist.FileStore(str(folder / f"rendezvous-{world_size}"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    results = {}
    with nccl_rules():
        for scenario in SCENARIOS[world_size]:
            place = folder / f"{scenario.__name__}-{world_size}"
            place.mkdir(exist_ok=True)
            results[scenario.__name__] = scenario(Ranks(rank, world_size, place))
            dist.barrier()
    (folder / f"results-{world_size}-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main(folder):
    """Run everything; the exit status is 0 only if every rank succeeds."""
    codes = [
        code
        for world_size in SCENARIOS
        for code in fork_ranks(world_size, lambda rank, size=world_size: play(size, rank, folder))
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
