"""Contradictions among the keys on parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrun.config.schema import Config

Contradiction = tuple[list[str], str]


def sharing_contradictions(config: Config) -> Iterator[Contradiction]:
    """Yield the keys, starting with the key to change, and the description of the contradiction."""
    job, train = config.job, config.train
    if train.parallel in ("single", "dp") and job.world_size > 1 and not config.command:
        what = "one rank" if train.parallel == "single" else "one process"
        yield (
            ["train.parallel", "job.gpus", "job.nodes"],
            f"{train.parallel} is for {what}, but {job.nodes} x {job.gpus} ranks would each train a "
            "separate model; use ddp, or one node and one gpu",
        )
    if train.compile and train.parallel == "dp":
        yield (
            ["train.compile", "train.parallel"],
            "dp copies the model in every step, which torch.compile does not support; use ddp",
        )
    if train.parallel == "fsdp":
        yield from _of_fsdp(config)
    if config.optim.name == "muon" and config.fsdp.cpu_offload:
        yield (
            ["optim.name", "fsdp.cpu_offload"],
            "muon gathers each matrix on its device, but cpu_offload keeps the shards on the CPU; use adamw, "
            "or remove fsdp.cpu_offload",
        )
    if config.fsdp.classes and config.fsdp.wrap != "classes":
        yield (
            ["fsdp.classes", "fsdp.wrap"],
            f"have no effect with fsdp.wrap={config.fsdp.wrap}; set fsdp.wrap=classes",
        )
    if config.fsdp.wrap == "classes" and not config.fsdp.classes:
        yield ["fsdp.classes", "fsdp.wrap"], "fsdp.wrap=classes needs names of module classes"
    for key, dtype in (
        ("param_dtype", config.fsdp.param_dtype),
        ("reduce_dtype", config.fsdp.reduce_dtype),
    ):
        if dtype == "fp16" and config.amp.dtype != "fp16":
            yield (
                [f"fsdp.{key}", "amp.dtype"],
                f"gradients in fp16 need the loss scale of amp.dtype=fp16, but amp.dtype is "
                f"{config.amp.dtype}; set amp.dtype=fp16, or use bf16",
            )


def _of_fsdp(config: Config) -> Iterator[Contradiction]:
    job, train = config.job, config.train
    if train.compression != "none":
        yield (
            ["train.compression", "train.parallel"],
            f"{train.compression} is a hook of DDP; with fsdp set fsdp.reduce_dtype",
        )
    if train.channels_last:
        yield (
            ["train.channels_last", "train.parallel"],
            "fsdp does not support channels_last; use ddp",
        )
    if train.compile and train.compile_mode == "reduce-overhead":
        yield (
            ["train.compile_mode", "train.parallel"],
            "reduce-overhead replays graphs at fixed addresses, but fsdp gathers weights at new addresses; "
            "use default or max-autotune",
        )
    if config.fsdp.cpu_offload and config.amp.dtype == "fp16" and not job.cpu:
        yield (
            ["amp.dtype", "fsdp.cpu_offload"],
            "torch's loss scaler reads a factor for offloaded gradients before its copy to the CPU has "
            "ended; use bf16, or fsdp.cpu_offload=false",
        )
    if config.fsdp.shard == "hybrid" and job.nodes == 1:
        yield (
            ["fsdp.shard", "job.nodes"],
            "hybrid keeps a copy on each node and needs several nodes; use full",
        )
