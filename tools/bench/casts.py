#!/usr/bin/env python3
"""Count the casts, and FSDP's gathered bytes, of a training step of the built-in model in bf16.

    tools/bench/casts.py [--width 256] [--vocabulary 32000]

Two ranks on the CPU take two steps each; the counts are those of rank 0. A cast is a call of
``aten::_to_copy``, and on a GPU a kernel. As on a GPU, autocast computes RMSNorm in fp32.
"""

import argparse
import tempfile
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hpcrun.config import AMPConfig
from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks.llama import Llama
from hpcrun.train.step.trainer import DistributedAMPTrainer


def rms_norm(x: Tensor, _shape: Any, weight: Any, _eps: Any = None) -> Tensor:
    """Take the place of RMSNorm, which is one kernel on a GPU and several operators with casts on the CPU."""
    if torch.is_autocast_enabled("cpu"):
        x, weight = x.float(), weight.float()
    result: Tensor = x * weight
    return result


class Calls(TorchDispatchMode):
    """Counts casts, and the bytes of each all-gather in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts = 0
        self.gathered: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name()
        if (
            name == "aten::_to_copy"
            and result.dtype != args[0].dtype
            and args[0].is_floating_point()
        ):
            self.casts += 1
        if "_allgather_base" in name:
            self.gathered.append(args[0].nbytes)
        return result


def step(rank: int, parallel: Any, layers: int, width: int, vocabulary: int) -> Calls:
    """Return the calls of the second step of a model with ``layers`` blocks."""
    shape = LanguageModelShape(
        layers=layers, heads=4, width=width, vocabulary=vocabulary, tied=False, context=64
    )
    trainer = DistributedAMPTrainer(
        Llama(shape),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        distributed=DistributedConfig(
            world_size=2, rank=rank, local_rank=rank, num_gpus_per_node=2
        ),
        parallel=parallel,
        amp=AMPConfig(dtype="bf16"),
        device="cpu",
    )
    trainer.wrap_model()
    batch = torch.randint(0, vocabulary, (2, 65))
    calls = Calls()
    for counted in (False, True):
        # The first step also compares the parts of the model between the ranks.
        if counted:
            with calls:
                trainer.training_step(batch, lambda model, seen: model(seen[:, :-1], seen[:, 1:]))
        else:
            trainer.training_step(batch, lambda model, seen: model(seen[:, :-1], seen[:, 1:]))
    return calls


def count(rank: int, meeting: str, width: int, vocabulary: int) -> None:
    """Take the steps as ``rank``; rank 0 prints the counts."""
    torch.set_num_threads(1)
    F.rms_norm = rms_norm  # type: ignore[assignment]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for parallel in ("ddp", "fsdp"):
        few, more = (step(rank, parallel, layers, width, vocabulary) for layers in (2, 3))
        if rank:
            continue
        print(f"{parallel}: {more.casts - few.casts} casts in a block, {few.casts} with two blocks")
        for size, times in Counter(few.gathered).items():
            print(f"  all-gathers of {size / 2**20:.1f} MiB: {times}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256, help="width of the model (256)")
    parser.add_argument("--vocabulary", type=int, default=32000, help="tokens (32000)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/meeting", given.width, given.vocabulary)
        spawn(count, arguments, 2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
