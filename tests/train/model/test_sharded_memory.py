"""Memory of sharded models on gloo ranks: deferred builds, and gradients between micro-batches."""

import hashlib
import json
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpcrun.config.training import FSDP
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.build import build_trainer
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.parallel.process_group import control_ranks
from hpcrun.train.position import Position
from hpcrun.train.setup import make_model
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import Task
from tests.support.on_ranks import agreed, ranks
from tests.support.training.deferring import Varied
from tests.support.training.small_training import config

RECOMPUTED = "_checkpoint_wrapped_module."
PARAMETERS = 4 * (64 * 64 + 64)


def nodes_of_two(rank, world_size):
    """Return the description of a rank with two ranks per node."""
    return DistributedConfig(
        world_size=world_size,
        rank=rank,
        local_rank=rank % 2,
        node_rank=rank // 2,
        num_nodes=world_size // 2,
        num_gpus_per_node=2,
    )


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


def built(rank, world_size, *settings):
    """Return the bits of a sharded model after wrapping, its first loss, and its bits after that step."""
    asked = config(
        "task=tests.train.model.test_sharded_memory:Given", "train.parallel=fsdp", *settings
    )
    task, distributed = Given(asked), nodes_of_two(rank, world_size)
    model, deferred = make_model(task, asked, distributed, control_ranks(distributed))
    assert (deferred is None) == ("fsdp.deferred_init=false" in settings)
    # The watchdog sees each parameter, so a long build is no hang.
    expected, position = 0 if deferred is None else len(deferred.parameters), Position()
    trainer = build_trainer(
        asked, task, model, distributed, "fsdp", deferred, advance=position.advance
    )
    assert position.parts == expected
    assert all(isinstance(p, DTensor) and not p.is_meta for p in trainer.module.parameters())
    before = bits(trainer.module)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    result = trainer.training_step(batch, task.loss)
    return before, result.loss.item(), bits(trainer.module)


OTHER_WAYS = {
    2: [
        ["train.activation_checkpointing=full", "train.ema=0.9"],
    ],
    4: [["fsdp.shard=hybrid", "job.nodes=2"]],
}


@ranks(2, 4)
def test_a_deferred_build_gives_all_ranks_normal_weights(rank, world_size, tmp_path):
    normal = built(rank, world_size, "fsdp.deferred_init=false")
    weights, of_two_ranks = agreed(normal[0]), tmp_path / "weights.json"
    if world_size == 4:
        assert json.loads(of_two_ranks.read_text()) == weights
    elif rank == 0:
        of_two_ranks.write_text(json.dumps(weights))
    # It also trains like a normal build.
    assert built(rank, world_size, "fsdp.deferred_init=true") == normal
    for settings in OTHER_WAYS[world_size]:
        assert built(rank, world_size, *settings)[0] == weights


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


def accumulated(rank, world_size, each):
    """Return the most gradients held at the start of a micro-batch, and the weights after two steps."""
    torch.manual_seed(0)
    trainer = DistributedAMPTrainer(
        torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        distributed=nodes_of_two(rank, world_size),
        parallel="fsdp",
        fsdp=FSDP(reduce_each_micro_batch=each),
        device="cpu",
    )
    trainer.wrap_model()
    held = []

    def loss(model, batch):
        held.append(gradients_held(trainer.module))
        return model(batch).square().mean()

    data = torch.Generator().manual_seed(rank)
    for _ in range(2):
        trainer.training_step(
            MicroBatches([torch.randn(4, 64, generator=data) for _ in range(4)]), loss
        )
    return max(held), [parameter.full_tensor() for parameter in trainer.module.parameters()]


@ranks(2, 4)
def test_reducing_each_micro_batch_holds_no_unsharded_gradients(rank, world_size):
    (none, each), (whole, last), (chosen, auto) = (
        accumulated(rank, world_size, way) for way in (True, False, "auto")
    )
    # A small model sends its gradients once per step.
    assert (none, whole, chosen) == (0, 4 * PARAMETERS, 4 * PARAMETERS)
    for ours, theirs, chosen_weights in zip(each, last, auto, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert torch.equal(chosen_weights, theirs)
