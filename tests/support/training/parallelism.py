"""A small model and the kinds of parallelism, for tests on several ranks."""

from dataclasses import asdict, dataclass

import torch
from torch import nn

from hpcrun.config import AMPConfig
from hpcrun.config.training import FSDP
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.model.prepare import Preparation
from hpcrun.train.optimizer import JointOptimizer
from hpcrun.train.step.trainer import DistributedAMPTrainer
from tests.support.training import small_training

BATCH = 16


@dataclass(frozen=True)
class Way:
    """A combination of training options; the defaults are the simplest."""

    parallel: str
    ranks: int
    dtype: str = "fp32"
    clip: bool = False
    recompute: str = "none"
    accumulation: int = 1
    compiled: bool = False
    shard: str = "full"
    reshard: bool = True
    optimizer: str = "adamw"

    @property
    def name(self):
        return "-".join(str(value) for value in asdict(self).values())


class Block(nn.Module):
    """A residual layer of odd sizes, so that shards are uneven and some ranks have empty shards."""

    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen, self.shrink = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.shrink(torch.tanh(self.widen(self.norm(x)))))


class Net(nn.Module):
    """Two blocks between two further layers, and a buffer that every training pass changes."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.enter = nn.Linear(6, 13)
        self.blocks = nn.ModuleList(Block(13, dropout) for _ in range(2))
        self.leave = nn.Linear(13, 1)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.passes += 1
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def adamw(model):
    # One operation per step; without fusion, torch dispatches several for each DTensor.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6, fused=True)


def with_muon(model):
    from examples.muon import muon  # Needs torch 2.9.

    return JointOptimizer(muon(model, small_training.config("train.lr=0.01")))


BUILDERS = {"adamw": adamw, "muon": with_muon}


def flat(module):
    """Return all weights as a vector."""
    return torch.cat([value.detach().flatten() for value in module.parameters()])


def trainer(
    way, rank, *, make=Net, build=None, optimizer=None, dropout=0.0, seed=0, unused=False,
):  # fmt: skip
    """Return a wrapped trainer, with the ranks on two nodes."""
    torch.manual_seed(seed)
    nodes = 2 if way.ranks > 1 else 1
    per_node = way.ranks // nodes
    module = make(dropout)
    made = DistributedAMPTrainer(
        module,
        build or BUILDERS[way.optimizer] if optimizer is None else optimizer(module.parameters()),
        distributed=DistributedConfig(
            world_size=way.ranks,
            rank=rank,
            local_rank=rank % per_node,
            num_nodes=nodes,
            node_rank=rank // per_node,
            num_gpus_per_node=per_node,
            find_unused_parameters=unused,
        ),
        device="cpu",
        amp=AMPConfig(dtype=way.dtype, init_scale=1024.0, growth_interval=4),
        clip_norm=0.5 if way.clip else None,
        parallel=way.parallel,
        fsdp=FSDP(
            shard=way.shard,
            reshard_after_forward=way.reshard,
        ),
        preparation=Preparation(
            checkpointing=way.recompute, compile="default" if way.compiled else None
        ),
    )
    made.wrap_model()
    return made


def batches(way, rank, first, last):
    """Return this rank's micro-batches of the steps, from 200 samples."""
    return small_training.batches(
        rank, way.ranks, first, last, batch_size=BATCH, accumulation=way.accumulation, size=200
    )
