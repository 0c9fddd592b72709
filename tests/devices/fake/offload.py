"""Program of ``test_fake_gpus.py``: the peak of a step with ``fsdp.cpu_offload``, on fake GPUs or estimated.

``python -m tests.devices.fake.offload step`` needs the guard. It counts the GPU's and the CPU's tensors.
``estimate`` needs no guard. Both print two numbers of bytes.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import TensorDataset

from hpcrun.config import Config, override_layer, resolve
from hpcrun.estimate.fake_run import FakeRun
from hpcrun.estimate.live_storages import LiveStorages
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.build import build_trainer
from hpcrun.train.task import Task
from hpcrun.worker import leave
from tests.devices.fake import device, train

WORLD, SAMPLES, WIDTH = 4, 64, 1024
SETTINGS = [
    *("job.nodes=1", f"job.gpus={WORLD}", f"train.batch_size={WORLD * SAMPLES}", "amp.dtype=bf16"),
    *("train.parallel=fsdp", "fsdp.cpu_offload=true"),
]


class Layers(Task):
    """Equal blocks, without attention: fake tensors on a GPU do not choose its kernel as a GPU does."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
                for _ in range(6)
            )
        )

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(torch.zeros(WORLD * SAMPLES, WIDTH))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().mean()


def step(config: Config) -> tuple[int, int]:
    """Return the most bytes of tensors that a step has on the fake GPU and on the host."""
    device.install()
    train.answer_reads()
    torch.Tensor.pin_memory = lambda value, *_: value
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    train.answer()
    new_group = dist.new_group
    # The real names are of gloo and NCCL, for which the other ranks would have to answer.
    dist.new_group = lambda ranks, **_: new_group(ranks, backend="fake")
    place = DistributedConfig(
        world_size=WORLD, backend="nccl", device_ids=(0,), num_gpus_per_node=WORLD
    )
    task = Layers(config)
    with (
        device.fake_tensors(),
        LiveStorages(device="cuda") as gpu,
        LiveStorages(device="cpu") as host,
    ):
        model = task.build_model().to(torch.device("cuda:0"))
        made = build_trainer(config, task, model, place, "fsdp")
        del model
        assert {p.device.type for p in made.module.parameters()} == {"cpu"}
        batch = [torch.zeros(SAMPLES, WIDTH)]
        for _ in range(2):
            gpu.start()
            host.start()
            made.training_step([batch], task.loss)
    return gpu.peak, host.peak


def main() -> None:
    config = resolve([override_layer(["task=tests.devices.fake.offload:Layers", *SETTINGS])])
    if sys.argv[1] == "step":
        print(*step(config))
    else:
        found = FakeRun(Layers(config), print).trace(config, 1 << 40)
        print(found.peak, found.offloaded)


if __name__ == "__main__":
    main()
    leave(
        0
    )  # As a rank. In an interpreter that shuts down, autograd's threads for a device may abort.
