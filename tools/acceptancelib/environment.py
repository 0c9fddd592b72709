"""Devices, libraries, and the environment that a checkpoint records."""

import os
from collections import Counter

from acceptancelib.outcome import Job, Outcome, needs_gpu
from acceptancelib.world import device_of
from hpcrun.devices import accelerator, vendor
from hpcrun.ranks.collective import Ranks
from hpcrun.train import determinism as drift
from hpcrun.train.determinism import NCCL_ORDER

_ON_GPU = ("device", "capability", "torch", "cudnn", "nccl")
_ON_CPU = ("device", "capability", "threads", "torch")


def check(job: Job) -> list[Outcome]:
    """Describe the machine, and compare the recorded environment with the promised keys."""
    return [_devices(job), _libraries(job), _recorded(job), _order()]


def _devices(job: Job) -> Outcome:
    if job.simulated:
        return needs_gpu("devices")
    devices = [device_of(job, index) for index in range(job.gpus)]
    names = Counter(accelerator.name(device) for device in devices)
    least = min(accelerator.memory(device)[1] for device in devices)
    free = min(accelerator.memory(device)[0] for device in devices)
    line = ", ".join(f"{count} x {name}" for name, count in names.items())
    line += f", {least / 1e9:.0f} GB each"
    details = {"devices": dict(names), "least_bytes": least, "least_free_bytes": free}
    if len(names) > 1:
        return Outcome(
            "devices", "warn", f"{line}: unequal GPUs", "train on equal GPUs: job.gpu_type", details
        )
    if free < 0.9 * least:
        return Outcome(
            "devices",
            "warn",
            f"{line}: only {free / 1e9:.0f} GB free on one of them",
            "end other programs on the GPUs (nvidia-smi), or take the node for this test only",
            details,
        )
    return Outcome("devices", "pass", line, details=details)


def _libraries(job: Job) -> Outcome:
    found = drift.libraries(device_of(job))
    build = vendor.build()
    line = ", ".join(f"{name} {version}" for name, version in found.items())
    details = {**found, "build": build}
    if job.simulated:
        return Outcome("libraries", "pass", line, details=details)
    if "nccl" not in found:
        return Outcome(
            "libraries", "fail", f"{line}: torch has no NCCL", "install a torch with NCCL", details
        )
    if "cudnn" not in found:
        return Outcome(
            "libraries",
            "warn",
            f"{line}: torch sees no cuDNN",
            "install a torch with cuDNN",
            details,
        )
    return Outcome("libraries", "pass", line, details=details)


def _recorded(job: Job) -> Outcome:
    found = drift.environment(device_of(job), Ranks())
    wanted = _ON_CPU if job.simulated else _ON_GPU
    missing = [key for key in wanted if key not in found]
    if not job.simulated and not {"cuda", "hip"} & found.keys():
        missing.append("cuda or hip")
    if missing:
        return Outcome(
            "recorded environment",
            "warn",
            f"a checkpoint here has no {', '.join(missing)}",
            "a resume cannot report a change of these; check that /proc is visible in the container",
            found,
        )
    recorded = [key for key, value in found.items() if value != drift.NOT_SET]
    return Outcome(
        "recorded environment",
        "pass",
        f"a checkpoint here records {', '.join(recorded)}",
        details=found,
    )


def _order() -> Outcome:
    other = {name: os.environ[name] for name in NCCL_ORDER if name in os.environ}
    other = {name: value for name, value in other.items() if value != NCCL_ORDER[name]}
    if not other:
        return Outcome("NCCL variables", "pass", "no variable changes the order of sums")
    theirs = " ".join(f"{name}={value}" for name, value in other.items())
    return Outcome(
        "NCCL variables",
        "warn",
        f"{theirs} may change the order of sums after an interruption",
        f"unset {' '.join(other)}, unless the cluster needs these values",
        other,
    )
