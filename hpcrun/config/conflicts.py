"""Keys that contradict each other, and keys without an effect."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from hpcrun.config.problems import value_text
from hpcrun.config.schema import Config
from hpcrun.config.training import FSDP

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
    if (
        train.comm_hook != "none"
        and train.parallel in ("single", "dp", "fsdp")
        and not config.command
    ):
        other = "set fsdp.reduce_dtype=bf16" if train.parallel == "fsdp" else "omit train.comm_hook"
        yield (
            ["train.comm_hook", "train.parallel"],
            f"{train.comm_hook} is a hook of DDP, and {train.parallel} has none; use train.parallel=ddp, or "
            f"{other}",
        )
    if train.compile and train.parallel == "dp":
        yield (
            ["train.compile", "train.parallel"],
            "dp copies the model in every step, which torch.compile does not support; use ddp",
        )
    if train.parallel == "fsdp":
        yield from _of_fsdp(config)
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
    if train.find_unused_parameters:
        yield (
            ["train.find_unused_parameters", "train.parallel"],
            "fsdp needs the same parameters on all ranks; use them all, times 0 where they do not count, or "
            "use ddp",
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
    if config.fsdp.shard == "hybrid" and job.min_nodes == 1:
        yield (
            ["fsdp.shard", "job.nodes"],
            "hybrid keeps a copy on each node and needs several nodes; use full",
        )


# Keys, the other key, the values of the other key without effect, and those with an effect.
_RULES: tuple[tuple[str, str, tuple[Any, ...], str], ...] = (
    ("train.lr_base_batch", "train.lr_scaling", ("none",), "sqrt or linear"),
    ("train.powersgd_rank", "train.comm_hook", ("none", "fp16", "bf16"), "powersgd"),
    ("train.powersgd_start", "train.comm_hook", ("none", "fp16", "bf16"), "powersgd"),
    ("fsdp.min_parameters", "fsdp.wrap", ("auto", "blocks"), "size"),
    ("train.compile_mode", "train.compile", (False,), "true"),
    ("train.hang_start", "train.hang_after", (None,), "a number of seconds"),
    ("train.connect_timeout", "train.hang_after", (None,), "a number of seconds"),
    ("train.broadcast_buffers", "train.parallel", ("single", "dp", "fsdp"), "ddp"),
    ("train.gradient_as_bucket_view", "train.parallel", ("single", "dp", "fsdp"), "ddp"),
    ("train.bucket_mb", "train.parallel", ("single", "dp", "fsdp"), "ddp"),
    ("train.find_unused_parameters", "train.parallel", ("single", "dp"), "ddp or fsdp"),
    *(
        (f"fsdp.{name}", "train.parallel", ("single", "dp", "ddp"), "fsdp")
        for name in FSDP.model_fields
    ),
    ("optim.betas", "optim.name", ("sgd",), "adamw or adam"),
    ("optim.eps", "optim.name", ("sgd",), "adamw or adam"),
    ("optim.momentum", "optim.name", ("adamw", "adam"), "sgd"),
    ("optim.decay_steps", "optim.schedule", ("cosine", "linear", "constant"), "wsd"),
    ("optim.final_lr_fraction", "optim.schedule", ("constant",), "a schedule with a decay"),
    ("amp.init_scale", "amp.dtype", ("fp32", "tf32", "bf16"), "fp16"),
    ("amp.dynamic", "amp.dtype", ("fp32", "tf32", "bf16"), "fp16"),
    *(
        (f"amp.{name}", other, values, remedy)
        for other, values, remedy in (
            ("amp.dtype", ("fp32", "tf32", "bf16"), "fp16"),
            ("amp.dynamic", (False,), "true"),
        )
        for name in ("growth_factor", "backoff_factor", "growth_interval")
    ),
    ("data.prefetch", "data.workers", (0,), "a number of processes"),
    ("checkpoint.minutes", "checkpoint.auto", (True,), "false"),
    ("job.node_checks", "job.preflight", (False,), "true"),
    ("checkpoint.memory_every", "restarts.in_place", (False,), "true"),
    ("checkpoint.memory_copies", "restarts.in_place", (False,), "true"),
    ("checkpoint.memory_copies", "checkpoint.memory_every", (0,), "null or a number of steps"),
)


def idle_keys(config: Config, given: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each ``given`` key that differs from its default and has no effect, with a remedy, once."""
    if config.command:
        return  # A command may read any key.
    seen = set()
    for key, other, values, remedy in _RULES:
        value = _value(config, other)
        if value not in values:
            continue
        if key in given and key not in seen and _value(config, key) != _default(key):
            seen.add(key)
            shown = value if isinstance(value, str) else json.dumps(value)
            text = f"has no effect with {other}={shown}; omit it, or set {other} to {remedy}"
            yield key, text
    window = config.train.profile
    if window is not None and int(window.partition("-")[0]) > config.train.steps:
        text = f"{value_text(window)} is after the last step, with train.steps={config.train.steps}"
        yield "train.profile", text


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _default(key: str) -> Any:
    section, _, name = key.partition(".")
    return type(Config.model_fields[section].default).model_fields[name].default
