"""Estimate the memory of a training on a GPU and the time of a step, without a
GPU: one step of one rank on tensors without data, in seconds to a minute.
Exit code 1: it does not fit.
  hpcrun estimate -c configs/gpt.yaml --gpu h100 --nodes 4 --gpus 8
  hpcrun estimate -c my.yaml --gpu-memory 40GiB train.micro_batch=2
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcrun.api.submission.choose_config import choose_config
from hpcrun.cli.arguments import request_of
from hpcrun.cli.output import print_json
from hpcrun.cli.runs_table import short_duration
from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.estimate.result import MEMORY_GIB, estimate, gib, gpu_memory
from hpcrun.estimate.spares import FAILURES, START_UP, SpareNodes, spare_nodes
from hpcrun.estimate.step_time import StepTime, step_time, why_lower_bound
from hpcrun.printing import say

_DOES_NOT_FIT = 1
_FITS = {
    True: "fits",
    False: "does not fit",
    None: "may fit: the activations need data, and are not counted",
}
_BF16 = "a V100 has no tensor cores for bf16, and torch emulates it: use amp.dtype=fp16"
_OF_TIME = (
    *("parallel", "parameters", "layers", "flops"),
    *("micro_batch", "accumulation", "reduces_each"),
)
_ROWS = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "average": "averaged weights",
    "rest": "gradients, activations",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "hpcrun estimate [-c FILE] --gpu NAME [options] [key.sub=value ...]"
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="YAML or JSON config")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="config overrides")
    gpu = parser.add_mutually_exclusive_group()
    gpu.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(MEMORY_GIB)}")
    gpu.add_argument("--gpu-memory", metavar="SIZE", help="memory of a GPU, such as 80GiB")
    parser.add_argument("--nodes", metavar="N", help="nodes (default: job.nodes)")
    parser.add_argument("--gpus", metavar="N", help="GPUs per node (default: job.gpus)")
    parser.add_argument(
        "--spares",
        metavar="K",
        help="spare nodes (default: job.spares; 0: enough for 95 of 100 jobs)",
    )
    parser.add_argument(
        "--failure-rate",
        type=float,
        default=FAILURES,
        metavar="F",
        help="failures per node and hour, for the lines about spare nodes (default: one in nine months)",
    )
    parser.add_argument(
        "--start-up",
        type=float,
        default=START_UP,
        metavar="S",
        help=f"seconds from the start of the ranks to the next step (default: {START_UP:.0f})",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object with sizes in bytes")


def run(arguments: argparse.Namespace) -> int:
    """Print the memory of a rank, whether it fits the GPU, and advice if it does not."""
    memory = gpu_memory(arguments.gpu, arguments.gpu_memory)
    config = choose_config(request_of(arguments))
    if config.command:
        raise UserError("command: estimate needs a task, since it cannot look into a command")
    spares = _spares(config, arguments)
    gpu = (arguments.gpu or "").lower()
    found = estimate(config, memory, gpu)
    slow = config.amp.dtype == "bf16" and gpu.startswith("v100")
    time = _time(found, config, gpu)
    remarks = [_BF16] * slow
    if isinstance(time, str):
        if not found["with_data"] and found["flops"] is None:
            time = (
                "there are no data to count the FLOPs of a sample; set the task's flops_per_sample"
            )
        remarks.append(f"no time of a step: {time}")
    found |= {"gpu": arguments.gpu, "gpu_memory": memory, "remarks": remarks}
    found["time"], small = None, None
    if isinstance(time, StepTime):
        if config.train.deterministic in (True, "strict"):
            remarks.append("the time is without the cost of train.deterministic=true")
        found["time"] = {**asdict(time), "seconds": time.seconds, "mfu": time.mfu}
        small = why_lower_bound(time, gpu, found["parameters"], found["accumulation"])
        remarks += [f"the time is a lower bound: {small}"] if small else []
    if arguments.json:
        known = {"spares": asdict(spares)} if spares else {}
        print_json({**found, "nodes": config.job.min_nodes, "gpus": config.job.gpus, **known})
    else:
        say(*_lines(found, config, arguments.gpu or "GPU"))
        if isinstance(time, StepTime):
            say(_time_line(time, found, least=small is not None))
        say(*(_spare_lines(spares, config.job.max_nodes) if spares else ()))
    return _DOES_NOT_FIT if found["fits"] is False else 0


def _lines(found: dict[str, Any], config: Config, gpu: str) -> Iterator[str]:
    job = config.job
    billions = found["parameters"] / 1e9
    size = f"{billions:.2f} billion" if billions >= 0.1 else f"{billions * 1000:.1f} million"
    ranks = f"{job.min_nodes} x {job.gpus} {gpu}" if found["ranks"] > 1 else f"one {gpu}"
    parallel = found["parallel"] + " hybrid" * (found["shard"] == "hybrid")
    yield f"{size} parameters, {parallel} on {ranks}, {config.amp.dtype}"
    yield from found["remarks"]
    yield (
        f"micro-batches of {found['micro_batch']}, {found['accumulation']} per step; "
        f"activation checkpointing: {config.train.activation_checkpointing}"
    )
    yield "at the peak of a step"
    for name, label in _ROWS.items():
        label = label if found["with_data"] else label.removesuffix(", activations")
        if found["parts"][name]:
            yield _row(label, found["parts"][name])
    yield _row(
        "peak of all tensors" if found["with_data"] else "without activations", found["peak"]
    )
    yield _row("with the GPU's own needs", found["needed"])
    yield _row("memory of the GPU", found["gpu_memory"])
    yield f"{_FITS[found['fits']]} ({found['seconds']:.0f} s)"
    if found["advice"]:
        yield "estimate again with one of:"
        yield from (f"  {line}" for line in found["advice"])


def _time(found: dict[str, Any], config: Config, gpu: str) -> StepTime | str:
    chosen = {"shard": found["shard"], "reshard_after_forward": found["reshards"]}
    fsdp = config.fsdp.model_copy(update=chosen)
    config = config.model_copy(update={"fsdp": fsdp})
    return step_time(config, gpu, **{name: found[name] for name in _OF_TIME})


def _time_line(time: StepTime, found: dict[str, Any], *, least: bool) -> str:
    rate = f"{time.samples_per_second * found['units']:,.0f} {found['unit']}/s for each GPU"
    takes, up_to = ("at least", "at most ") if least else ("about", "")
    line = f"a step takes {takes} {time.seconds:.3g} s: {up_to}{rate}, MFU {time.mfu:.0%}"
    if time.communication:
        line += f"; communication {time.communication:.2g} s, of these {time.exposed:.2g} s alone"
    return line


def _spares(config: Config, arguments: argparse.Namespace) -> SpareNodes | None:
    """Return the spare nodes of a job with a fixed number of nodes; None for one node or a range."""
    job, rate = config.job, arguments.failure_rate
    found = spare_nodes(
        job.max_nodes, failures=rate, start_up=arguments.start_up, spares=job.spares
    )
    return None if job.elastic or job.max_nodes == 1 else found


def _spare_lines(found: SpareNodes, nodes: int) -> Iterator[str]:
    named = f"{found.spares} spare {'node' if found.spares == 1 else 'nodes'} for {nodes}"
    yield f"{named}: {found.share:.1%} of the node hours, {found.failures:.2g} failures in 24 h"
    pays = f"of {short_duration(found.queue)} or more" if found.queue else "of any length"
    yield (
        f"a failure costs {short_duration(found.replacement)} with a spare node, without one "
        f"{short_duration(found.requeue)} and the queue: spares pay with a queue {pays}"
    )


def _row(label: str, size: int) -> str:
    return f"  {label:<26}{gib(size):>12}"
