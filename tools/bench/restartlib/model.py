"""The model and the data that every system of the benchmark trains."""

import time

import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH, SAMPLES, BATCH = 640, 4096, 32
# Seconds. Steps without a pause would keep the cores of a small machine busy while another rank starts.
PAUSE = 0.05


class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random vectors and their sums."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return values, values.sum()


def build_model() -> nn.Module:
    """Return the model: 0.4 M parameters, so that its gradients take several buckets."""
    return nn.Sequential(
        *(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU()), nn.Linear(WIDTH, 1)
    )


def loss(model: nn.Module, values: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch, after a pause."""
    time.sleep(PAUSE)
    result: torch.Tensor = (model(values).squeeze(-1) - sums).square().mean()
    return result
