"""The schema of training: the loop, batches, precision, optimizer, sharding and logging."""

from typing import Annotated, Literal

from pydantic import Field

from hpcrun.config.fields import (
    BelowOne,
    Count,
    Fraction,
    FromZero,
    Growing,
    NotifyTarget,
    NotNegative,
    Positive,
    Section,
    Shrinking,
    StepWindow,
    TaskSection,
    Word,
)


class ModelOptions(TaskSection):
    """Keys of the task on the model; ``own`` holds their values."""


class DataOptions(TaskSection):
    """Keys of the data loader (``torch.utils.data``), and the task's keys on the data in ``own``."""

    workers: FromZero | None = Field(
        default=None,
        description="Data loader processes per rank; null: from job.cpus_per_task, or none.",
    )
    prefetch: Count = Field(default=2, description="Batches that each loader process reads ahead.")


class Train(Section):
    """The training loop: steps, batch, parallelism, compilation, validation and hang detection.

    Sources: ``torch.nn.parallel.DistributedDataParallel``, ``torch.compile``, ``torch.utils.checkpoint``;
    powersgd: Vogels et al. 2019, arXiv:1905.13727; lr_scaling: Goyal et al. 2017, arXiv:1706.02677 (linear),
    Malladi et al. 2022, arXiv:2205.10287 (sqrt).
    """

    steps: Count = Field(default=1000, description="Optimizer steps of the whole run.")
    batch_size: Count = Field(default=32, description="Samples per optimizer step, over all ranks.")
    accumulation: Count = Field(
        default=1, description="Micro-batches per optimizer step on each rank."
    )
    micro_batch: Count | None = Field(
        default=None,
        description="Maximum samples per micro-batch; accumulation follows from it.",
    )
    lr: Positive = Field(default=3e-4, description="Peak learning rate.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="Scaling of lr with batch_size / lr_base_batch."
    )
    lr_base_batch: Count | None = Field(
        default=None, description="Batch size that lr was tuned for."
    )
    clip_norm: Positive | None = Field(
        default=1.0, description="Gradient norm for clipping; null: no clipping."
    )
    nonfinite_limit: Count = Field(
        default=10,
        description="Consecutive steps with gradients that are not finite after which training stops.",
    )
    log_every: Count = Field(default=10, description="Steps between lines of metrics.")
    validate_every: FromZero = Field(
        default=0, description="Steps between validations; 0: only at the end."
    )
    validate_batches: Count | None = Field(
        default=None, description="Batches of each validation; null: the whole set."
    )
    patience: Count | None = Field(
        default=None,
        description="Validations without a better loss before training ends; null: no early stopping.",
    )
    init_from: Word | None = Field(
        default=None,
        description="Initial weights: safetensors, a DCP folder, or checkpoints of hpcrun; null: as built.",
    )
    init_rename: dict[str, str | None] = Field(
        default={},
        description="New beginnings for names in init_from, by old beginning; null: leave these tensors out.",
    )
    ema: BelowOne | None = Field(
        default=None,
        description="Decay of the weights' moving average, used for validation; null: none.",
    )
    parallel: Literal["auto", "single", "dp", "ddp", "fsdp"] = Field(
        default="auto",
        description="Parallelism; auto: ddp if the model fits a device, else fsdp.",
    )
    find_unused_parameters: bool = Field(
        default=False,
        description="Allow parameters without a gradient on some ranks or in some steps.",
    )
    broadcast_buffers: bool = Field(
        default=True,
        description="DDP: copy rank 0's buffers to all ranks before every forward pass.",
    )
    gradient_as_bucket_view: bool = Field(
        default=True,
        description="DDP: let gradients share the memory of the communication buckets.",
    )
    bucket_mb: Annotated[Positive, Field(ge=1)] | None = Field(
        default=None,
        description="DDP: MiB of gradients per all-reduce; null: from the parameters and the ranks.",
    )
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = Field(
        default="none", description="DDP: compression of the gradients that ranks exchange."
    )
    powersgd_rank: Count = Field(default=1, description="PowerSGD: rank of the approximation.")
    powersgd_start: Annotated[Count, Field(ge=2)] = Field(
        default=1000, description="PowerSGD: steps with whole gradients at the start, 2 or more."
    )
    compile: bool = Field(default=False, description="Compile the model with torch.compile.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        default="default", description="Mode of torch.compile."
    )
    activation_checkpointing: Literal["none", "full", "selective"] = Field(
        default="none",
        description="Recompute activations: of all blocks, or all but costly operations.",
    )
    deterministic: Literal[True, False, "warn", "strict"] = Field(
        default=True,
        description="Deterministic kernels; strict: refuse other bits on resume; warn, false: any kernel.",
    )
    timeout: Positive = Field(
        default=600.0,
        description="Collective timeout (s) when the watchdog is off.",
    )
    hang_after: Positive | None = Field(
        default=300.0,
        description="Hang timeout (s) of a step, at most half of timeout; null: no hang detection.",
    )
    hang_start: Positive = Field(
        default=1800.0,
        description="Hang timeout (s) of the first step and work outside steps; Task.prepare: 48 times it.",
    )
    connect_timeout: Positive = Field(
        default=300.0,
        description="Hang timeout (s) of NCCL's connection at the start, at most hang_start.",
    )
    stop_check_every: Count = Field(
        default=1, description="Steps between collective checks for a stop request."
    )
    profile: StepWindow | None = Field(
        default=None, description="Steps to profile, such as 10-15 (inclusive)."
    )
    affinity: bool = Field(default=True, description="Bind each rank to separate CPU cores.")


class FSDP(Section):
    """Sharding of weights, gradients and optimizer state over ranks, with ``train.parallel: fsdp``.

    Sources: ``torch.distributed.fsdp.fully_shard``; Zhao et al. 2023, arXiv:2304.11277.
    """

    shard: Literal["auto", "full", "hybrid"] = Field(
        default="auto",
        description="full: over all ranks; hybrid: within each node, copies over nodes; auto: by prediction.",
    )
    wrap: Literal["auto", "blocks", "size"] = Field(
        default="auto",
        description="Units to gather: blocks of lists and large layers, only blocks, or modules by size.",
    )
    min_parameters: Count = Field(
        default=1_000_000,
        description="wrap=size: least parameters of a module that is gathered separately.",
    )
    reshard_after_forward: Literal["auto", True, False] = Field(
        default="auto",
        description="Free gathered weights after the forward pass; auto: from 10 % of memory.",
    )
    deferred_init: Literal["auto", True, False] = Field(
        default="auto",
        description="Build weights on rank 0 only; auto: if parallel=fsdp and the model allows.",
    )
    reduce_each_micro_batch: Literal["auto", True, False] = Field(
        default="auto",
        description="Reduce gradients in every micro-batch, to save memory; auto: from 2 GB of gradients.",
    )
    cpu_offload: bool = Field(
        default=False, description="Keep shards and optimizer state on the CPU between uses."
    )
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Precision of gathered weights; null: amp.dtype."
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default="fp32", description="Precision of the gradient reduction; null: as param_dtype."
    )


class Optim(Section):
    """The optimizer and the schedule of its learning rate.

    Sources: ``torch.optim``. adamw: Loshchilov, Hutter 2019, arXiv:1711.05101;
    cosine: Loshchilov, Hutter 2017, arXiv:1608.03983; wsd: Hu et al. 2024, arXiv:2404.06395.
    """

    name: Literal["adamw", "adam", "sgd"] = Field(default="adamw", description="Optimizer.")
    betas: tuple[BelowOne, BelowOne] = Field(
        default=(0.9, 0.95), description="Adam: decay of the two moment estimates."
    )
    eps: Positive = Field(default=1e-8, description="Adam: term added to the denominator.")
    weight_decay: NotNegative = Field(default=0.1, description="Weight decay.")
    momentum: BelowOne = Field(default=0.9, description="SGD: momentum.")
    fused: bool = Field(default=True, description="Use torch's fused kernel if available.")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        default="cosine",
        description="Learning rate after the warm-up; wsd: constant, then a linear decay at the end.",
    )
    warmup_steps: FromZero = Field(default=0, description="Steps of linear warm-up from zero.")
    decay_steps: Count | None = Field(
        default=None, description="wsd: steps of the decay; null: a tenth of train.steps."
    )
    final_lr_fraction: Fraction = Field(
        default=0.1, description="Learning rate at the end, as a fraction of the peak."
    )


class AMPConfig(Section):
    """Mixed precision, and the loss scaling that fp16 needs.

    Sources: ``torch.amp``, ``torch.amp.GradScaler``; Micikevicius et al. 2018, arXiv:1710.03740.
    """

    dtype: Literal["fp32", "tf32", "bf16", "fp16"] = Field(
        default="fp32",
        description="Precision of autocast; tf32: fp32 with matrix products in TensorFloat-32.",
    )
    init_scale: Positive = Field(default=65536.0, description="fp16: loss scale at the start.")
    growth_factor: Growing = Field(
        default=2.0, description="fp16: growth factor of the loss scale."
    )
    backoff_factor: Shrinking = Field(
        default=0.5, description="fp16: factor of the loss scale after an overflow."
    )
    growth_interval: Count = Field(
        default=2000, description="fp16: steps without overflow before the scale grows."
    )
    dynamic: bool = Field(
        default=True, description="fp16: adapt the scale; false: keep init_scale."
    )


class Watch(Section):
    """Where to log metrics in addition to metrics.jsonl."""

    tensorboard: bool = Field(
        default=False,
        description="Write metrics for TensorBoard to tensorboard/ in the run directory.",
    )
    wandb: Word | None = Field(
        default=None, description="Weights & Biases project to send metrics to."
    )
    sinks: list[Word] = Field(
        default=[], description="Names of metric sinks that other packages add."
    )
    peak_flops: Positive | None = Field(
        default=None,
        description="Peak FLOP/s of the device, for MFU; null: the figure of a known device.",
    )
    notify: NotifyTarget | None = Field(
        default=None, description="Shell command that gets a message at the end of the run."
    )
    notify_on: list[
        Literal["finished", "failed", "cancelled", "stopped", "budget-used-up", "requeued"]
    ] = Field(
        default=["finished", "failed", "cancelled", "stopped", "budget-used-up"],
        description="Events that send a notification.",
    )
