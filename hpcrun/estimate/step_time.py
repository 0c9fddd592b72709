"""Time of a training step from its arithmetic, memory traffic and communication. Imports no torch.

A GPU reaches a part of its peak in a training of a large language model. The parts are those that agree best
with the published trainings in docs/estimate.md. A small model has short kernels and is slower.
"""

from dataclasses import dataclass

from hpcrun.config import Config
from hpcrun.train.parallel.network import Group, allowed, ddp, default_bucket, fsdp_step

# Peak TFLOP/s of bf16, TB/s of memory, and the part of the peak in compiled and in eager training. Data
# sheets: NVIDIA A100 2021, H100 2023, H200 2024, B200 2025; AMD MI300X 2023.
GPUS = {
    "a100-40": (312, 1.56, 0.64, 0.60),
    "a100-80": (312, 2.04, 0.64, 0.60),
    "h100": (989, 3.35, 0.47, 0.43),
    "h200": (989, 4.8, 0.47, 0.43),
    "b200": (2250, 8.0, 0.47, 0.43),
    "mi300x": (1307, 5.3, 0.47, 0.43),
}
_RECOMPUTED = {"none": 1.0, "selective": 1.0, "full": 4 / 3}
"""Arithmetic with activation checkpointing; selective keeps the results of products."""

_OPTIMIZER_BYTES = 28
"""Bytes of AdamW per parameter: weight, gradient and two moments read, three of these written, in fp32."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: ``computation``, ``optimizer``, and ``communication``, mostly during computation."""

    computation: float
    optimizer: float
    communication: float
    samples: float
    model_flops: float
    peak: float

    @property
    def seconds(self) -> float:
        """Return the step's seconds: communication overlaps with computation as long as it lasts."""
        return max(self.computation, self.communication) + self.optimizer

    @property
    def samples_per_second(self) -> float:
        """Return the samples of a GPU per second."""
        return self.samples / self.seconds

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: arithmetic without recomputation, relative to the peak."""
        return self.model_flops / self.seconds / self.peak


def step_time(
    config: Config,
    gpu: str,
    *,
    parallel: str,
    parameters: int,
    layers: int,
    flops: float,
    micro_batch: int,
    accumulation: int,
) -> StepTime | None:
    """Return the time of a step; None for an unknown GPU, or a precision other than bf16 and fp16.

    Args:
        gpu: a key of ``GPUS``.
        layers: units that FSDP gathers one after the other.
        flops: of a sample, forward and backward, without recomputation.
        micro_batch: samples of a GPU in a micro-batch.
        accumulation: micro-batches of a step.
    """
    if gpu not in GPUS or config.amp.dtype not in ("bf16", "fp16"):
        return None
    tera, memory, compiled, eager = GPUS[gpu]
    train, job = config.train, config.job
    ranks = job.min_nodes * job.tasks_on_node
    group = Group(ranks, min(ranks, job.tasks_on_node), gpu)
    samples = micro_batch * accumulation
    model_flops = flops * samples
    part = compiled if train.compile else eager
    hybrid, communication, shards = config.fsdp.shard == "hybrid", 0.0, 1
    if parallel == "fsdp":
        communication = fsdp_step(config, parameters, layers, group, accumulation, hybrid=hybrid)
        shards = group.on_node if hybrid else ranks
    elif ranks > 1:
        bucket = train.bucket_mb or default_bucket(4 * parameters, ranks) or 25
        communication = ddp(parameters, group, bucket, allowed(config))
    return StepTime(
        computation=model_flops
        * _RECOMPUTED[train.activation_checkpointing]
        / (part * tera * 1e12),
        optimizer=_OPTIMIZER_BYTES * parameters / shards / (memory * 1e12),
        communication=communication,
        samples=samples,
        model_flops=model_flops,
        peak=tera * 1e12,
    )
