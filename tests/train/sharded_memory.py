"""Program of ``test_sharded_memory.py``: gloo ranks build sharded models without memory, and accumulate.

``python -m tests.train.sharded_memory FOLDER`` writes ``WORLD-RANK.json`` into the folder.
"""

import hashlib
import json
import random
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import override_layer, resolve
from hpcrun.config.training import FSDP
from hpcrun.train.build import build_trainer
from hpcrun.train.setup.deferral import build_model
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import Task
from tests.train.forks import fork_ranks
from tests.train.test_deferred import OWN, Varied

WORLDS = (2, 4)
RECOMPUTED = "_checkpoint_wrapped_module."


class Given(Task):
    """A task with the model of many initializers."""

    def build_model(self):
        model = Varied()
        if dist.get_rank() == 1:
            # The values and the order of rank 0 count.
            for parameter in reversed([*model.blocks.parameters()]):
                parameter.data.mul_(2)
        return model

    def build_optimizer(self, model):
        # All ranks draw the same rates, with a deferred build too.
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.optim.AdamW(model.parameters(), lr=0.01 + sum(drawn) / 100)

    def train_dataset(self):
        raise AssertionError("no data here")

    def loss(self, model, batch):
        return model(batch).square().mean()


def bits(model):
    """Return a hash per name of the whole state, gathered from all ranks."""
    state = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        whole = value.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        state[name.replace(RECOMPUTED, "")] = hashlib.sha256(
            whole.contiguous().numpy().tobytes()
        ).hexdigest()
    return state


def built(distributed, *settings):
    """Return the bits of a sharded model after wrapping, and whether its build was deferred."""
    given = ["task=tests.train.sharded_memory:Given", "train.parallel=fsdp", *settings]
    config = resolve([override_layer(given)])
    task = Given(config)
    OWN.manual_seed(4)
    model, deferred = build_model(task, config, distributed)
    trainer = build_trainer(config, task, model, distributed, "fsdp", deferred)
    sharded = all(isinstance(p, DTensor) and not p.is_meta for p in trainer.module.parameters())
    found = {"bits": bits(trainer.module), "deferred": deferred is not None, "sharded": sharded}
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    result = trainer.training_step([batch], task.loss)
    return {**found, "loss": result.loss.item(), "trained": bits(trainer.module)}


def gradients_held(module):
    """Return the bytes of unsharded gradients that this rank holds."""
    held = 0
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for parameter in (each for group in groups if group for each in group.fsdp_params):
                whole = getattr(parameter, "_unsharded_param", None)
                for gradient in (
                    parameter.unsharded_accumulated_grad,
                    None if whole is None else whole.grad,
                ):
                    held += 0 if gradient is None else gradient.nbytes
    return held


def accumulated(distributed, each):
    """Return the gradients held at the start of micro-batches, and the weights after two steps."""
    torch.manual_seed(0)
    trainer = DistributedAMPTrainer(
        torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        distributed=distributed,
        parallel="fsdp",
        fsdp=FSDP(reduce_each_micro_batch=each),
        device="cpu",
    )
    trainer.wrap_model()
    held = []

    def loss(model, batch):
        held.append(gradients_held(trainer.module))
        return model(batch).square().mean()

    data = torch.Generator().manual_seed(distributed.rank)
    for _ in range(2):
        trainer.training_step([torch.randn(4, 64, generator=data) for _ in range(4)], loss)
    weights = [parameter.full_tensor().tolist() for parameter in trainer.module.parameters()]
    return {"held": max(held), "weights": weights}


def play(world_size, rank, folder):
    """Build the model both ways, and on several meshes."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"rendezvous-{world_size}"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    nodes = world_size // 2
    distributed = DistributedConfig(
        world_size=world_size,
        rank=rank,
        local_rank=rank % 2,
        node_rank=rank // 2,
        num_nodes=nodes,
        num_gpus_per_node=2,
    )
    ways = {
        "normal": built(distributed, "fsdp.deferred_init=false"),
        "deferred": built(distributed, "fsdp.deferred_init=true"),
    }
    if nodes == 1:
        units = ["fsdp.wrap=size", "fsdp.min_parameters=100"]
        ways["units"] = built(distributed, *units)
        ways["recomputed"] = built(
            distributed, "train.activation_checkpointing=full", "train.ema=0.9"
        )
    else:
        ways["hybrid"] = built(distributed, "fsdp.shard=hybrid", "job.nodes=2")
    found = {
        "built": ways,
        "accumulated": {
            str(each): accumulated(distributed, each) for each in (True, False, "auto")
        },
    }
    (folder / f"{world_size}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(folder):
    """Run all worlds; the exit status is 0 only if every rank succeeds."""
    codes = [
        code
        for world_size in WORLDS
        for code in fork_ranks(world_size, lambda rank, size=world_size: play(size, rank, folder))
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
