"""A set of rank processes on this machine: one per GPU with NCCL, or gloo ranks in a simulation."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from acceptancelib.outcome import Job
from hpcrun.devices import accelerator
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.determinism import choose_kernels

_PROGRAM = Path(__file__).parent


@dataclass(frozen=True)
class Member:
    """The view of one rank."""

    job: Job
    distributed: DistributedConfig
    device: torch.device


def device_of(job: Job, index: int = 0) -> torch.device:
    """Return GPU ``index``, or the CPU in a simulation."""
    return torch.device("cpu") if job.simulated else accelerator.device(index)


def run_ranks(job: Job, environ: dict[str, str] | None = None) -> list[Any]:
    """Start fresh processes that run ``rank`` of the check's module; return their results, by rank.

    ``environ``: further variables of the processes.

    Raises:
        RuntimeError: a rank failed; with its last line.
        TimeoutError: the ranks did not end in the time of the job.
    """
    place = Path(tempfile.mkdtemp(prefix="ranks-", dir=job.folder))
    # A file instead of a port, because another program may use the port.
    inner = json.dumps(asdict(job))
    environ = os.environ | {"ACCEPTANCE_MEETING": str(place / "meeting")} | (environ or {})
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(job.ranks):
            with (place / f"{rank}.log").open("wb") as log:
                command = [
                    sys.executable,
                    str(_PROGRAM),
                    inner,
                    str(place / f"{rank}.json"),
                    str(rank),
                ]
                started.append(
                    subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
                )
        _wait(started, place, job.seconds)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [
        json.loads((place / f"{rank}.json").read_text(encoding="utf-8"))
        for rank in range(job.ranks)
    ]


def _wait(started: list["subprocess.Popen[bytes]"], place: Path, seconds: float) -> None:
    late = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in started]
        if any(codes) or None not in codes:
            break
        if time.monotonic() > late:
            raise TimeoutError(f"the ranks did not end in {seconds:.0f} s")
        time.sleep(0.05)
    for rank, code in enumerate(codes):
        if code:
            lines = (place / f"{rank}.log").read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"rank {rank}: {lines[-1] if lines else f'exit code {code}'}")


@contextlib.contextmanager
def member(job: Job, rank: int) -> Iterator[Member]:
    """Join the process group of :func:`run_ranks` as ``rank``, also if it is the only rank."""
    device = device_of(job, rank)
    if not job.simulated:
        accelerator.make_current(device)
    distributed = DistributedConfig(
        world_size=job.ranks,
        rank=rank,
        local_rank=rank,
        num_gpus_per_node=job.ranks,
        backend="gloo" if job.simulated else "nccl",
        device_ids=() if job.simulated else (rank,),
    )
    # NCCL reads its variables when it makes its first group.
    choose_kernels(True)
    dist.init_process_group(
        distributed.backend,
        init_method=Path(os.environ["ACCEPTANCE_MEETING"]).as_uri(),
        rank=rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=min(60.0, job.seconds)),
    )
    try:
        yield Member(job, distributed, device)
    finally:
        dist.destroy_process_group()
