"""Trains with DDP and mixed precision by the calls of the guide to distributed training (document 001)."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hpcrun import DistributedAMPTrainer, create_default_amp_config


class Model(nn.Module):
    """Its output is the loss, so that a step needs the batch only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, y):
        return (self.layer(x).squeeze(1) - y).square().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--local-rank", type=int, help="given by torch.distributed.launch")
    settings = yaml.safe_load(parser.parse_args().config.read_text())

    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {dist.is_initialized()}", flush=True)
    torch.manual_seed(0)
    trainer = DistributedAMPTrainer(
        model=Model(),
        config=create_default_amp_config(
            use_dynamic_scaling=True, dynamic_history_size=100, initial_scale=2.0**15
        ),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        learning_rate=settings["learning_rate"],
    )
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.sum(1))
    sampler = DistributedSampler(
        dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=True
    )
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=True)
    step = 0
    for epoch in range(settings["epochs"]):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = trainer.training_step(batch)
            step += 1
            if trainer.is_main_process:
                print(f"Loss: {loss}")
    if trainer.is_main_process:
        print(f"scale {trainer.scaler.get_scale()}")
        trainer.save_checkpoint(
            "checkpoint.pth", include_optimizer=True, metadata={"step": step, "loss": loss}
        )
    if dist.is_initialized():
        dist.barrier()
    trainer.load_checkpoint("checkpoint.pth")

    checkpoint = torch.load("checkpoint.pth", map_location="cpu")
    plain = Model()
    plain.load_state_dict(checkpoint["model_state_dict"])
    dist.barrier()
    if trainer.is_main_process:
        print(f"saved after {checkpoint['metadata']['step']} steps", flush=True)
        print(f"final loss {plain(inputs, inputs.sum(1)).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
