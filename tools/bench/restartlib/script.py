"""The same training as a plain script for torchrun or ft_launcher: it saves often and loads at its start."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from restartlib import model as shared
from restartlib.marks import mark, mark_steps

EVERY = 10
"""Steps between saves."""


def main() -> None:
    """Train until the job ends."""
    mark("imported")
    saved = Path(os.environ["RESTART_BENCH_SAVED"])
    client = None
    if "RESTART_BENCH_FT" in os.environ:
        from nvidia_resiliency_ext.fault_tolerance import (  # type: ignore[import-not-found]
            RankMonitorClient,
        )

        client = RankMonitorClient()
        client.init_workload_monitoring()
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    mark("joined")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(shared.build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    mark("restored")
    mark_steps()
    data = shared.Numbers()
    each = shared.BATCH // ranks
    for step in range(first, 1_000_000):
        begin = step * shared.BATCH + rank * each
        samples = [data[index % len(data)] for index in range(begin, begin + each)]
        values, sums = (torch.stack(column) for column in zip(*samples, strict=True))
        optimizer.zero_grad()
        shared.loss(model, values, sums).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if client is not None:
            client.send_heartbeat()
        if rank == 0 and (step + 1) % EVERY == 0:
            state = {"step": step + 1, "model": model.state_dict()}
            torch.save(state | {"optimizer": optimizer.state_dict()}, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)
            mark("saved")


main()
