"""Time of a training step from its arithmetic, memory traffic and communication. Imports no torch.

A GPU reaches a part of its peak in a training of a large language model. The parts are those that agree best
with the published trainings in docs/estimate.md. A small model is slower:
:func:`why_lower_bound`.
"""

from dataclasses import dataclass

from hpcrun.config import Config
from hpcrun.train.parallel.network import Group, allowed, ddp, default_bucket, fsdp_passes

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
_OPTIMIZER_BYTES = 28
"""Bytes of AdamW per parameter: weight, gradient and two moments read, three of these written, in fp32."""

_HALF = ("bf16", "fp16")
_SMALL = 1e9
"""Parameters: the parts of the peak in ``GPUS`` come from models with 1.3 to 13 billion."""
_READING = 0.25
"""Part of the computation that reading the weights may take before it decides the time."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: ``computation``, ``optimizer``, ``communication``, and ``exposed``.

    ``exposed``: the communication that takes longer than the computation at the same time. ``peak``: FLOP/s.
    """

    computation: float
    optimizer: float
    communication: float
    exposed: float
    samples: float
    model_flops: float
    peak: float

    @property
    def seconds(self) -> float:
        """Return the step's seconds."""
        return self.computation + self.exposed + self.optimizer

    @property
    def samples_per_second(self) -> float:
        """Return the samples of a GPU per second."""
        return self.samples / self.seconds

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilization: arithmetic without recomputation, relative to the peak."""
        return self.model_flops / self.seconds / self.peak


def why_lower_bound(time: StepTime, gpu: str, parameters: int, accumulation: int) -> str | None:
    """Return the reason why a real step takes much longer than ``time``; None for large models.

    Source of the figures: mosaicml/llm-foundry, scripts/train/benchmarking/README.md, MPT with 2048 tokens on
    eight A100 with 80 GB, micro-batches of 40 and 14 samples: MFU 44.8 % and 59.9 %.

    Args:
        time: of a step on one GPU.
        gpu: a key of ``GPUS``.
        parameters: of the model.
        accumulation: micro-batches of a step.
    """
    if parameters < _SMALL:
        return (
            "kernels of a model with less than a billion parameters are short: MPT with 125 million reached "
            "45 % of an A100's peak, with 1.3 billion 60 % (llm-foundry)"
        )
    # Two bytes per parameter in the forward pass, and in both products of the backward pass.
    reading = accumulation * 6 * parameters / (GPUS[gpu][1] * 1e12)
    if reading > _READING * time.computation:
        return "the micro-batch is small, so that reading the weights takes much of the time"
    return None


def step_time(
    config: Config,
    gpu: str,
    *,
    parallel: str,
    parameters: int,
    layers: int,
    flops: float | None,
    micro_batch: int,
    accumulation: int,
    reduces_each: bool,
) -> StepTime | str:
    """Return the time of a step, or the reason why it is unknown.

    Args:
        gpu: a key of ``GPUS``; with other texts the time is unknown.
        layers: units that FSDP gathers one after the other.
        flops: of a sample, forward and backward, without recomputation; None: unknown.
        micro_batch: samples of a GPU in a micro-batch.
        accumulation: micro-batches of a step.
        reduces_each: FSDP reduces gradients in each micro-batch, not only in the last.
    """
    if gpu not in GPUS:
        return f"it is known for --gpu {', '.join(GPUS)}"
    if config.amp.dtype not in _HALF:
        return f"it is known for bf16 and fp16, not for amp.dtype={config.amp.dtype}"
    if flops is None:
        return "the model reads values, so its FLOPs cannot be counted; set the task's flops_per_sample"
    tera, memory, compiled, eager = GPUS[gpu]
    train, job = config.train, config.job
    ranks = job.min_nodes * job.tasks_on_node
    group = Group(ranks, min(ranks, job.tasks_on_node), gpu)
    speed = (compiled if train.compile else eager) * tera * 1e12
    forward = flops * micro_batch / 3 / speed
    # Full checkpointing computes the forward pass again; selective checkpointing keeps the products.
    backward = forward * (3 if train.activation_checkpointing == "full" else 2)
    gather, reduce, shards = 0.0, 0.0, 1
    if parallel == "fsdp":
        hybrid = config.fsdp.shard == "hybrid"
        gather, reduce = fsdp_passes(config, parameters, layers, group, hybrid=hybrid)
        shards = group.on_node if hybrid else ranks
    elif ranks > 1:
        bucket = train.bucket_mb or default_bucket(4 * parameters, ranks) or 25
        reduce = ddp(parameters, group, bucket, allowed(config))
    # Computation of a pass, and communication at the same time.
    passes: list[tuple[float, float]] = []
    for number in range(accumulation):
        reshards = config.fsdp.reshard_after_forward
        reduces = number == accumulation - 1 or (parallel == "fsdp" and reduces_each)
        passes.append((forward, gather if reshards or number == 0 else 0.0))
        passes.append((backward, gather * bool(reshards) + reduce * reduces))
    return StepTime(
        computation=sum(computation for computation, _ in passes),
        optimizer=_OPTIMIZER_BYTES * parameters / shards / (memory * 1e12),
        communication=sum(communication for _, communication in passes),
        exposed=sum(max(0.0, communication - computation) for computation, communication in passes),
        samples=micro_batch * accumulation,
        model_flops=flops * micro_batch * accumulation,
        peak=tera * 1e12,
    )
