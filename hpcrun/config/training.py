"""What a user can ask of the training itself: the loop, its batches, its precision, its optimiser."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcrun.config.fields import (
    BelowOne,
    Count,
    Fraction,
    FromZero,
    Growing,
    NotNegative,
    Positive,
    Shrinking,
    StepWindow,
    Word,
)
from hpcrun.config.section import Section, TaskSection


class ModelOptions(TaskSection):
    """The task's own keys about the model."""


class DataOptions(TaskSection):
    """The data loader's keys, and the task's own about the data."""

    workers: FromZero | None = Field(
        default=None,
        description="Data loader processes for each rank; null: by job.cpus_per_task, or none.",
    )
    prefetch: Count = Field(default=2, description="Batches that each loader process reads ahead.")


class Train(Section):
    """The training loop."""

    steps: Count = Field(default=1000, description="Optimiser steps of the whole training.")
    batch_size: Count = Field(default=32, description="Samples per optimiser step, over all ranks.")
    accumulation: Count = Field(
        default=1, description="Micro-batches per optimiser step on each rank."
    )
    micro_batch: Count | None = Field(
        default=None,
        description="Most samples a rank takes at once; accumulation follows from it.",
    )
    uneven: Literal["across", "drop", "pad", "join"] = Field(
        default="across",
        description="An epoch's last batch: filled from the next epoch, dropped, or short (masked, Join).",
    )
    lr: Positive = Field(default=3e-4, description="Peak learning rate.")
    lr_scaling: Literal["none", "sqrt", "linear"] = Field(
        default="none", description="How lr grows with batch_size over lr_base_batch."
    )
    lr_base_batch: Count | None = Field(
        default=None, description="The batch size that lr was chosen for."
    )
    clip_norm: Positive | None = Field(
        default=1.0, description="Gradient norm to clip at; null: none."
    )
    nonfinite: Literal["skip", "stop"] = Field(
        default="skip",
        description="On a gradient that is not finite, and no overflow of fp16: skip the step, or stop.",
    )
    nonfinite_limit: Count = Field(
        default=10, description="Skipped steps in a row after which training stops."
    )
    log_every: Count = Field(default=10, description="Steps between two lines of metrics.")
    validate_every: FromZero = Field(
        default=0, description="Steps between validations; 0: only at the end."
    )
    validate_batches: Count | None = Field(
        default=None, description="Batches of each validation; null: the whole set."
    )
    patience: Count | None = Field(
        default=None,
        description="Validations without a better loss after which training ends; null: none.",
    )
    min_delta: NotNegative = Field(
        default=0.0, description="By how much a validation loss must fall to count as better."
    )
    ema: BelowOne | None = Field(
        default=None,
        description="Decay of an average of the weights, used to validate; null: none.",
    )
    parallel: Literal["auto", "single", "dp", "ddp", "fsdp"] = Field(
        default="auto",
        description="How ranks share the work; auto: ddp if the model fits a device, else fsdp.",
    )
    find_unused_parameters: bool = Field(
        default=False,
        description="Allow parameters to be without gradient on some ranks, in some steps.",
    )
    broadcast_buffers: bool = Field(
        default=True, description="DDP: take rank 0's buffers at the start of every forward pass."
    )
    gradient_as_bucket_view: bool = Field(
        default=True,
        description="DDP: let gradients share the memory of the communication buckets.",
    )
    compression: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        default="none", description="DDP: how gradients are compressed on their way between ranks."
    )
    powersgd_rank: Count = Field(default=1, description="PowerSGD: rank of the approximation.")
    powersgd_start: Count = Field(
        default=1000, description="PowerSGD: steps with whole gradients at the start, 2 or more."
    )
    compile: bool = Field(default=False, description="Compile the model with torch.compile.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        default="default", description="Mode of torch.compile."
    )
    activation_checkpointing: Literal["none", "full", "every", "selective"] = Field(
        default="none",
        description="Recompute activations: of all blocks, every n-th, or all but costly operations.",
    )
    checkpoint_blocks: Count = Field(
        default=2, description="activation_checkpointing=every: the n of every n-th block."
    )
    channels_last: bool = Field(
        default=False, description="Lay images out as NHWC, which convolutions on GPUs like."
    )
    deterministic: Literal[True, False, "warn"] = Field(
        default=True,
        description="Only kernels that give the same bits; warn: torch warns of others, false: takes any.",
    )
    timeout: Positive = Field(
        default=600.0,
        description="Seconds until a collective is given up where no watchdog watches.",
    )
    hang_after: Positive | None = Field(
        default=300.0,
        description="Seconds without a step until a job has hung, at most half of timeout; null: never.",
    )
    hang_start: Positive = Field(
        default=1800.0,
        description="As hang_after, for a first step and all beside the steps; prepare: 48 times that.",
    )
    stop_check_every: Count = Field(
        default=1, description="Steps between two agreements of the ranks on whether to stop."
    )
    profile: StepWindow | None = Field(
        default=None, description="Steps to profile, such as 10-15, both included."
    )
    affinity: bool = Field(
        default=True, description="Bind each rank to CPU cores of its own, near its GPU."
    )


class FSDP(Section):
    """Sharding of weights, gradients and optimiser state over ranks (train.parallel: fsdp)."""

    shard: Literal["full", "hybrid"] = Field(
        default="full",
        description="full: over all ranks; hybrid: within each node, copies over nodes.",
    )
    wrap: Literal["blocks", "size", "classes"] = Field(
        default="blocks",
        description="What is gathered at once: blocks of the model's lists, modules by size, or by class.",
    )
    min_parameters: Count = Field(
        default=1_000_000,
        description="wrap=size: parameters that make a module worth gathering alone.",
    )
    classes: list[Word] = Field(default=[], description="wrap=classes: names of module classes.")
    reshard_after_forward: bool = Field(
        default=True, description="Free gathered weights after the forward pass, to save memory."
    )
    cpu_offload: bool = Field(
        default=False, description="Keep shards and optimiser on the CPU between uses."
    )
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Precision weights are gathered and used in; null: amp.dtype."
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default="fp32", description="Precision gradients are reduced in; null: as param_dtype."
    )
    buffer_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None,
        description="Precision of floating-point buffers; null: as the model has them.",
    )


class Optim(Section):
    """The optimiser and the schedule of its learning rate."""

    name: Literal["adamw", "adam", "sgd"] = Field(default="adamw", description="Optimiser.")
    betas: tuple[BelowOne, BelowOne] = Field(
        default=(0.9, 0.95), description="Adam: decay of the two moment estimates."
    )
    eps: Positive = Field(default=1e-8, description="Adam: term added to the denominator.")
    weight_decay: NotNegative = Field(default=0.1, description="Weight decay.")
    momentum: BelowOne = Field(default=0.9, description="SGD: momentum.")
    fused: bool = Field(default=True, description="Use torch's fused kernel where there is one.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="Learning rate after the warm-up; wsd: constant, then a linear decay at the end.",
    )
    warmup_steps: FromZero = Field(default=0, description="Steps of linear warm-up from zero.")
    decay_steps: Count | None = Field(
        default=None, description="wsd: steps of the decay; null: a tenth of all."
    )
    final_lr_fraction: Fraction = Field(
        default=0.1, description="Learning rate at the end, as a fraction of the peak."
    )


class AMPConfig(Section):
    """Mixed precision, and the loss scaling that fp16 needs."""

    dtype: Literal["fp32", "tf32", "bf16", "fp16"] = Field(
        default="fp32",
        description="Precision of autocast; tf32: fp32 with matrix products in TensorFloat-32.",
    )
    init_scale: Positive = Field(default=65536.0, description="fp16: loss scale at the start.")
    growth_factor: Growing = Field(default=2.0, description="fp16: factor when the scale grows.")
    backoff_factor: Shrinking = Field(
        default=0.5, description="fp16: factor on an overflowing gradient."
    )
    growth_interval: Count = Field(
        default=2000, description="fp16: steps without overflow before the scale grows."
    )
    dynamic: bool = Field(
        default=True, description="fp16: adapt the scale; false: keep init_scale."
    )


class Watch(Section):
    """What is told of a training beside metrics.jsonl."""

    tensorboard: bool = Field(
        default=False,
        description="Write metrics for TensorBoard to tensorboard/ in the run directory.",
    )
    wandb: Word | None = Field(
        default=None, description="Weights & Biases project to send metrics to."
    )
    peak_flops: Positive | None = Field(
        default=None,
        description="The device's peak in FLOP/s, for MFU; null: known devices' own figure.",
    )
