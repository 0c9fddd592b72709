"""Keys that contradict each other, and keys without an effect."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator

from hpcrun.config.problems import value_text
from hpcrun.config.schema import Keys
from hpcrun.config.training import FSDP

Contradiction = tuple[list[str], str]


def contradictions(config: Keys) -> Iterator[Contradiction]:
    """Yield contradictions between valid keys: the keys, starting with the key to change, and the text."""
    job, train = config.job, config.train
    yield from _of_nodes(config)
    if train.micro_batch is not None and train.accumulation > 1:
        yield (
            ["train.accumulation", "train.micro_batch"],
            "follows from train.micro_batch and the number of ranks; omit one of them",
        )
    if train.lr_scaling != "none" and train.lr_base_batch is None:
        yield (
            ["train.lr_base_batch", "train.lr_scaling"],
            f"lr_scaling={train.lr_scaling} needs the batch size that train.lr was chosen for; set it",
        )
    if train.patience is not None and not train.validate_every:
        yield (
            ["train.validate_every", "train.patience"],
            "train.patience counts validations during training; set the steps between validations",
        )
    saves = config.checkpoint
    if config.restarts.replace_slow and not (saves.every or saves.minutes or saves.auto):
        yield (
            ["checkpoint.every", "restarts.replace_slow"],
            "restarts.replace_slow restarts after a save during training; set the steps between saves",
        )
    yield from _of_sharing(config)
    if config.optim.warmup_steps > train.steps:
        yield (
            ["optim.warmup_steps", "train.steps"],
            f"{config.optim.warmup_steps} is more than train.steps={train.steps}; lower it",
        )
    if config.optim.schedule == "wsd":
        ends = config.optim.warmup_steps + (config.optim.decay_steps or 0)
        if config.optim.warmup_steps <= train.steps < ends:
            yield (
                ["optim.decay_steps", "optim.warmup_steps", "train.steps"],
                f"warm-up and decay take {ends} steps, but train.steps is {train.steps}",
            )
    yield from _of_tasks(config)
    yield from _of_image(config)
    if job.executor == "debug" and job.world_size != 1:
        yield (
            ["job.executor", "job.nodes", "job.gpus"],
            f"debug runs one rank in one process, but {job.nodes} x {job.tasks_on_node} are requested; "
            "use one node and one gpu, or the local executor",
        )
    if job.gpu_type is not None and job.gpu_request == "none" and not job.cpu:
        yield (
            ["job.gpu_type", "job.gpu_request"],
            f"job.gpu_request=none requests no GPUs, so it cannot request the type {job.gpu_type}; omit "
            "the type, or choose nodes by their features with job.constraint",
        )
    limit = job.time_seconds
    if limit is not None and limit <= job.signal_lead:
        yield (
            ["job.time", "job.signal_lead"],
            f"the limit {job.time} is not longer than job.signal_lead ({job.signal_lead} s), the warning "
            "before it; set a longer limit, or a shorter job.signal_lead",
        )


def _of_image(config: Keys) -> Iterator[Contradiction]:
    """Yield contradictions among the keys on the container."""
    job = config.job
    if job.mounts and job.image is None:
        yield ["job.mounts"], "needs job.image; set the image, or omit the key"
    if job.container and job.image is not None:
        yield (
            ["job.container", "job.image"],
            "job.image chooses the words before the command; omit job.container",
        )
    if job.image is not None and job.executor == "debug":
        yield (
            ["job.executor", "job.image"],
            "debug runs the rank in this process, outside the image; use the local executor",
        )


def _of_tasks(config: Keys) -> Iterator[Contradiction]:
    """Yield contradictions among the keys on the number of tasks per node."""
    job = config.job
    if job.launcher is not None and not config.command:
        yield (
            ["job.launcher"],
            f"{job.launcher} starts your script; write the script after `--`, or remove the key",
        )
    elif job.launcher is not None and job.tasks_per_node not in (None, 1):
        yield (
            ["job.tasks_per_node", "job.launcher"],
            f"{job.launcher} is the only task of a node and starts the ranks; remove the key",
        )
    elif job.tasks_per_node not in (None, job.gpus) and not config.command:
        yield (
            ["job.tasks_per_node", "job.launcher", "job.gpus"],
            "training by hpcrun has one task per GPU; set job.gpus instead, or write your command after "
            "`--`",
        )


def _of_nodes(config: Keys) -> Iterator[Contradiction]:
    """Yield what contradicts the number of nodes: the keys, starting with the key to change, and the text."""
    job, train = config.job, config.train
    ranks = job.tasks_on_node * (train.accumulation if train.micro_batch is None else 1)
    parts = job.max_nodes * ranks
    # A command of the user may divide its work in any way.
    if train.batch_size < parts and not config.command:
        # Uneven micro-batches are weighted, so every number of nodes with enough samples gives the mean of
        # the batch.
        fits = train.batch_size // ranks
        fewer = f", or job.nodes={_as_range(job.min_nodes, fits)}" if fits >= job.min_nodes else ""
        yield (
            ["train.batch_size", "job.gpus", "job.nodes", "train.accumulation"],
            f"{train.batch_size} samples are too few for {job.max_nodes} x {job.gpus} ranks x "
            f"{ranks // job.tasks_on_node} micro-batches, each with at least one; use {parts} or more"
            f"{fewer if job.elastic else ''}",
        )
    if job.spares and not config.restarts.in_place:
        yield (
            ["job.spares", "restarts.in_place"],
            "a spare node serves a restart inside the allocation; set restarts.in_place=true, "
            "or use no spares",
        )
    if not job.elastic:
        return
    if job.spares:
        yield (
            ["job.spares", "job.nodes"],
            f"a job with {job.nodes} nodes continues without a lost node, so spare nodes would be idle; use "
            "one number of nodes, or no spares",
        )
    if train.deterministic == "strict" and not config.command:
        yield (
            ["job.nodes", "train.deterministic"],
            f"strict refuses other bits on resume, and the bits depend on the number of nodes, {job.nodes}; "
            "use one number of nodes, or train.deterministic=true",
        )


def _as_range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}-{most}"


def _of_sharing(config: Keys) -> Iterator[Contradiction]:
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


def _of_fsdp(config: Keys) -> Iterator[Contradiction]:
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
_RULES: tuple[tuple[str, str, tuple[object, ...], str], ...] = (
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


def idle_keys(config: Keys, given: Collection[str]) -> Iterator[tuple[str, str]]:
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


def _value(config: Keys, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _default(key: str) -> object:
    section, _, name = key.partition(".")
    return type(Keys.model_fields[section].default).model_fields[name].default
