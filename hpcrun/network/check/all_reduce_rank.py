"""One rank of an all-reduce over the nodes of a check: ``python -m hpcrun.network.check.all_reduce_rank``.

The rank first prints a line with the number of GPUs and the port on which it would listen as rank 0. Then the
rank reads its order from standard input, and prints its progress. The agent ends a rank that hangs.
"""

import datetime
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hpcrun.devices import accelerator
from hpcrun.network.check.all_reduce import MIB, SIZES, bus_bandwidth
from hpcrun.ranks.addresses import listen, wanted_ports
from hpcrun.ranks.interfaces import gloo_interface

_REPEATS = 5


def main() -> None:
    """Report the resources of this process, wait for the order, and carry it out."""
    torch.set_num_threads(1)
    gpus = accelerator.count() if dist.is_nccl_available() else 0
    listener = listen([*wanted_ports(os.environ, f"netcheck {os.getpid()}"), 0])
    _say(stage="here", gpus=gpus, port=listener.getsockname()[1])
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    try:
        if order["rank"] == 0:
            listening = listener.detach()
        else:
            listener.close()
            listening = None
        _say(stage="done", **_measured(order, listening))
    except (RuntimeError, ValueError, OSError) as error:
        _say(stage="failed", problem=" ".join(str(error).split())[:300])
    # Exit even if NCCL or gloo still waits.
    sys.stdout.flush()
    os._exit(0)


def _measured(order: Mapping[str, Any], listening: int | None) -> dict[str, Any]:
    """Join the group and return the all-reduce's figures."""
    limit = datetime.timedelta(seconds=order["limit"])
    if order["backend"] == "nccl":
        accelerator.make_current(accelerator.device(order["local"]))
    os.environ.update(gloo_interface(os.environ, order["peers"]))
    store = TCPStore(
        order["address"],
        order["port"],
        world_size=order["ranks"],
        is_master=order["rank"] == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    dist.init_process_group(
        order["backend"],
        store=store,
        rank=order["rank"],
        world_size=order["ranks"],
        timeout=limit,
    )
    on_gpu = order["backend"] == "nccl"
    device = accelerator.default_device() if on_gpu else torch.device("cpu")
    _sum(torch.ones(1, device=device), order["ranks"])
    _say(stage="joined")
    size = SIZES[0]
    seconds = _timed(size, order["ranks"], device, 1)
    for larger in SIZES[1:]:
        if seconds * (larger / size) * _REPEATS > order["seconds"]:
            break
        size, seconds = larger, _timed(larger, order["ranks"], device, 1)
    seconds = _timed(size, order["ranks"], device, _REPEATS)
    busbw = bus_bandwidth(size, seconds, order["ranks"])
    return {"bytes": size, "seconds": seconds, "busbw": busbw}


def _timed(size: int, ranks: int, device: torch.device, repeats: int) -> float:
    """Return the seconds of one all-reduce of ``size`` bytes: those of the slowest rank, the same on all.

    Raises:
        ValueError: a sum is wrong.
    """
    tensor = torch.zeros(size // 4, device=device)
    dist.barrier()
    begun = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    accelerator.synchronize(device)
    longest = torch.tensor([(time.perf_counter() - begun) / repeats], device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    _sum(torch.ones(MIB // 4, device=device), ranks)
    return float(longest)


def _sum(tensor: torch.Tensor, ranks: int) -> None:
    """Add up ``tensor`` over the ranks, and check the sum."""
    dist.all_reduce(tensor)
    if not bool((tensor == ranks).all()):
        raise ValueError(f"the all-reduce over {ranks} ranks has a wrong sum")


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
