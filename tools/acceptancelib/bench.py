"""Throughput and MFU of a user's run of ``configs/llama-1b.yaml``, with both kinds of kernels."""

import json
import os
import statistics
import time
from typing import Any

import numpy as np

from acceptancelib.outcome import REPORT, Job, Outcome
from acceptancelib.runs import ROOT, submit_config, wait_for
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json, read_lines

CONFIG = ROOT / "configs" / "llama-1b.yaml"
LOW = 0.2
"""MFU below which the outcome is a warning: 0.3 to 0.6 is usual (docs/training.md)."""

_EVERY, _WARM, _LINES = 2, 3, 6
"""Steps of a line of metrics, lines of the warm-up, and lines that count."""

_ACCUMULATION = 4
_MEMORY = "out of memory"

TINY: dict[str, Any] = {
    "model.layers": 1, "model.heads": 4, "model.kv_heads": 2, "model.width": 64,
    "model.mlp_width": 128, "model.vocabulary": 512, "model.context": 64, "model.document_end": 3,
    "train.compile": False, "amp.dtype": "fp32", "watch.peak_flops": 1e11, "job.cpu": True,
}  # fmt: skip
"""The same run on CPUs: a small model, and a peak, since that of a CPU is unknown."""


def check(job: Job) -> list[Outcome]:
    """Run the config twice; halve ``train.micro_batch`` while the first run does not fit the GPUs."""
    late = time.monotonic() + 0.95 * job.seconds
    micro_batch = 2 if job.simulated else 8
    vocabulary, end = (512, 3) if job.simulated else (128256, 128001)
    tokens = np.random.default_rng(0).integers(0, vocabulary, 2**22, dtype="<u4")
    tokens[::997] = end
    (job.place / "tokens.bin").write_bytes(tokens.tobytes())
    while True:
        fast = measure(job, "false", micro_batch, late)
        if fast.get("failed") != _MEMORY or micro_batch == 1:
            break
        micro_batch //= 2
    exact = {} if "failed" in fast else measure(job, "true", micro_batch, late)
    return [judge(fast, exact, micro_batch, job)]


def settings(job: Job, deterministic: str, micro_batch: int) -> list[str]:
    """Return the overrides of a run, which this check ends before its last step."""
    cores = len(os.sched_getaffinity(0)) // job.ranks
    wanted = {
        "data.tokens": [str(job.place / "tokens.bin")],
        "data.validation_tokens": [],
        "job.executor": "local",
        "job.nodes": 1,
        "job.gpus": job.ranks,
        "job.cpus_per_task": max(1, min(8, cores)),
        "train.deterministic": deterministic == "true",
        "train.micro_batch": micro_batch,
        "train.batch_size": _ACCUMULATION * micro_batch * job.ranks,
        "train.log_every": _EVERY,
        "train.validate_every": 0,
        "checkpoint.every": 0,
        "restarts.crash": 0,
        **(TINY if job.simulated else {}),
    }
    return [f"{key}={it if isinstance(it, str) else json.dumps(it)}" for key, it in wanted.items()]


def measure(job: Job, deterministic: str, micro_batch: int, late: float) -> dict[str, Any]:
    """Return medians of the metrics of a run, or why it has none under ``failed``."""
    name = f"deterministic-{deterministic}-{micro_batch}"
    words = settings(job, deterministic, micro_batch)
    run = submit_config(job, name, CONFIG, "--detach", "--no-snapshot", *words)
    seconds = max(1.0, late - time.monotonic())
    # Without the checkpoint of 15 GB at the end.
    wait_for(job, run, lambda: len(read_lines(run.metrics)) >= _WARM + _LINES, seconds, "--now")
    lines = read_lines(run.metrics)[_WARM:]
    if len(lines) < _LINES:
        return {"failed": why(run)}
    keys = ("tokens_per_second", "step_time", "mfu", "memory_gb", "data_wait")
    return {key: statistics.median(line[key] for line in lines) for key in keys if key in lines[0]}


def why(run: RunDirectory) -> str:
    """Return why a run has ended early."""
    logs = (path.read_text(errors="replace") for path in run.logs.rglob("rank-*.log"))
    if any(_MEMORY in text for text in logs):
        return _MEMORY
    return str((read_json(run.result) or {}).get("reason", "the run ended without a reason"))


def judge(fast: dict[str, Any], exact: dict[str, Any], micro_batch: int, job: Job) -> Outcome:
    """Return the outcome from the figures of ``train.deterministic=false`` and ``true``."""
    details = {"false": fast, "true": exact, "micro_batch": micro_batch}
    for value, figures in (("false", fast), ("true", exact)):
        if "failed" in figures:
            line = f"train.deterministic={value}: {figures['failed']}"
            return Outcome("speed", "fail", line, REPORT, details)
    ranks = "1 rank" if job.ranks == 1 else f"{job.ranks} ranks"
    line = (
        f"{CONFIG.name}, {ranks}, micro-batches of {micro_batch}: {told(fast)}, "
        f"{fast['memory_gb']:.1f} GB; train.deterministic=true: {told(exact)}, "
        f"a step {exact['step_time'] / fast['step_time']:.2f} x as long"
    )
    if job.simulated or fast.get("mfu", 1.0) >= LOW:
        return Outcome("speed", "pass", line, details=details)
    remedy = "look for other programs on the GPU, power limits and temperature (nvidia-smi -q)"
    return Outcome("speed", "warn", f"{line}; usual is an MFU above {LOW}", remedy, details)


def told(figures: dict[str, Any]) -> str:
    mfu = f"MFU {figures['mfu']:.1%}" if "mfu" in figures else "MFU unknown for this device"
    return f"{figures['tokens_per_second']:,.0f} tokens/s, {mfu}"
