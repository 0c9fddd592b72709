"""What cannot be together among the keys that say how ranks share the work."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrun.config.schema import Config

Contradiction = tuple[list[str], str]


def sharing_contradictions(config: Config) -> Iterator[Contradiction]:
    """Yield the keys, first the one to change, and what is wrong between them."""
    job, train = config.job, config.train
    if train.parallel in ("single", "dp") and job.world_size > 1 and not config.command:
        what = "one rank" if train.parallel == "single" else "one process"
        yield (
            ["train.parallel", "job.gpus", "job.nodes"],
            f"{train.parallel} is for {what}, and {job.nodes} x {job.gpus} are asked for, which would each "
            "train a model of their own; use ddp, or one node and one gpu",
        )
    if train.compile and train.parallel == "dp":
        yield (
            ["train.compile", "train.parallel"],
            "dp copies the model in every step, which compiled ones are not made for; use ddp",
        )
    if train.parallel == "fsdp":
        yield from _of_fsdp(config)
    if config.fsdp.classes and config.fsdp.wrap != "classes":
        yield (
            ["fsdp.classes", "fsdp.wrap"],
            f"are not looked at with fsdp.wrap={config.fsdp.wrap}; set fsdp.wrap=classes",
        )
    if config.fsdp.wrap == "classes" and not config.fsdp.classes:
        yield ["fsdp.classes", "fsdp.wrap"], "fsdp.wrap=classes needs the names of some"
    for key, dtype in (
        ("param_dtype", config.fsdp.param_dtype),
        ("reduce_dtype", config.fsdp.reduce_dtype),
    ):
        if dtype == "fp16" and config.amp.dtype != "fp16":
            yield (
                [f"fsdp.{key}", "amp.dtype"],
                f"gradients in fp16 need the loss scale of amp.dtype=fp16, which is {config.amp.dtype}; "
                "set that too, or use bf16",
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
            "fsdp shards plain weights only; use ddp",
        )
    if train.compile and train.compile_mode == "reduce-overhead":
        yield (
            ["train.compile_mode", "train.parallel"],
            "reduce-overhead replays graphs at fixed addresses, and fsdp gathers weights at new ones; "
            "use default or max-autotune",
        )
    if config.fsdp.shard == "hybrid" and job.nodes == 1:
        yield (
            ["fsdp.shard", "job.nodes"],
            "hybrid keeps a copy on each of several nodes, and there is one; use full",
        )
