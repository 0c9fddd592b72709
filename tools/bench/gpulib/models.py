"""A GPT with random weights, its trainer and its batches, all made on the device."""

import math

import torch
from torch import Tensor, nn

from gpulib.sizes import BF16, Size, kept_in
from hpcrun.config import AMPConfig
from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks.llama import Llama
from hpcrun.train.model.prepare import Preparation
from hpcrun.train.step.trainer import DistributedAMPTrainer


def build(size: Size, device: torch.device, dtype: torch.dtype) -> Llama:
    """Return the model with random weights, made on the device: on the host, 7 billion take minutes."""
    shape = LanguageModelShape(
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        context=size.context,
        vocabulary=size.vocabulary,
    )
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = _Hollow(shape)
    model = model.to(dtype).to_empty(device=device)
    made = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2:
                weight.fill_(1.0)
            else:
                weight.normal_(std=0.02 / math.sqrt(2 * size.layers), generator=made)
    return model


class _Hollow(Llama):
    def draw_weights(self) -> None:
        """Initialize weights, because meta tensors have no values."""


def next_byte(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the language model's loss."""
    loss: Tensor = model(batch[:, :-1], batch[:, 1:])
    return loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)


def batches(size: Size, device: torch.device, count: int) -> list[Tensor]:
    """Return batches of random tokens: the arithmetic is the same, and no data is read."""
    made = torch.Generator(device).manual_seed(1)
    shape = (size.batch, size.context + 1)
    return [
        torch.randint(0, size.vocabulary, shape, device=device, generator=made)
        for _ in range(count)
    ]


def one_rank(device: torch.device) -> DistributedConfig:
    """Return the description of a single rank on ``device``."""
    on_gpu = device.type == "cuda"
    return DistributedConfig(
        backend="nccl" if on_gpu else "gloo",
        device_ids=(device.index,) if on_gpu and device.index is not None else (),
    )


def trainer_for(
    size: Size, device: torch.device, *, compiled: bool
) -> tuple[DistributedAMPTrainer, str]:
    """Return the trainer, and the precision of its weights.

    Raises:
        MemoryError: even half-precision weights do not fit with their gradients and moments.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**40
    kept = kept_in(size, free)
    if kept is None:
        need = size.parameters * BF16 / 1e9
        raise MemoryError(
            f"{need:.0f} GB of weights, gradients and moments do not fit {free / 1e9:.0f} GB that are free; "
            "leave this size out"
        )
    trainer = DistributedAMPTrainer(
        build(size, device, torch.float32 if kept == "fp32" else torch.bfloat16),
        adamw,
        distributed=one_rank(device),
        parallel="single",
        amp=AMPConfig(dtype="bf16"),
        clip_norm=1.0,
        device=device,
        preparation=Preparation(
            checkpointing="full" if size.recompute else "none",
            compile="default" if compiled else None,
        ),
    )
    trainer.wrap_model()
    return trainer, kept
