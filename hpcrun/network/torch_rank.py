"""A process with torch for the checks of a node: ``python -m hpcrun.network.torch_rank``.

The process first prints a line with its versions, the number of GPUs, and the port on which it would listen
as rank 0. Then it reads one order from standard input, a matrix product or an all-reduce, and prints its
progress. The agent ends a process that hangs.
"""

import datetime
import json
import os
import sys
import time
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hpcrun.devices import accelerator, vendor
from hpcrun.network.measurements import MIB, SIZES, bus_bandwidth
from hpcrun.ranks.addresses import listen, wanted_ports
from hpcrun.ranks.interfaces import gloo_interface

_REPEATS = 5
_SIZE = 512
# Large enough that the launch time of the kernel does not matter.
_TIMED_SIZE, _TIMED, _WARM = 4096, 20, 5


def main() -> None:
    """Report the resources of this process, wait for the order, and carry it out."""
    torch.set_num_threads(1)
    gpus = accelerator.count()
    listener = listen([*wanted_ports(os.environ, f"netcheck {os.getpid()}"), 0])
    port = listener.getsockname()[1]
    with_nccl = gpus if dist.is_nccl_available() else 0
    _say(stage="here", gpus=with_nccl, port=port, versions=vendor.versions())
    line = sys.stdin.readline()
    if not line:
        return
    order = json.loads(line)
    try:
        if order["do"] == "multiply":
            _multiply_all(0 if order["cpu"] else gpus)
            _say(stage="done")
        else:
            listening = listener.detach() if order["rank"] == 0 else None
            _say(stage="done", **_measured(order, listening))
    except (RuntimeError, ValueError, OSError) as error:
        _say(stage="failed", problem=" ".join(str(error).split())[:300])
    # Exit even if NCCL or gloo still waits.
    sys.stdout.flush()
    os._exit(0)


def _multiply_all(gpus: int) -> None:
    """Multiply on each GPU, one after the other, or on the CPU without a GPU.

    The entries are small integers, so that each sum is exact in 32-bit floats (and in TF32), in any order.
    Each good device of any model therefore returns the same bits.
    """
    devices = [accelerator.device(index) for index in range(gpus)] or [torch.device("cpu")]
    left, right = _matrix(7, 13), _matrix(5, 11)
    expected = left.double() @ right.double()
    for device in devices:
        try:
            _say(stage="product", device=str(device), **_multiply(device, left, right, expected))
        except RuntimeError as error:
            words = " ".join(str(error).split())[:300]
            _say(stage="product", device=str(device), problem=words)


def _matrix(row: int, column: int) -> torch.Tensor:
    """Return a matrix of integers from -8 to 8."""
    steps = torch.arange(_SIZE)
    return ((steps[:, None] * row + steps[None, :] * column) % 17 - 8).float()


def _multiply(
    device: torch.device, left: torch.Tensor, right: torch.Tensor, expected: torch.Tensor
) -> dict[str, Any]:
    product = (left.to(device) @ right.to(device)).cpu()
    found = {
        "wrong": int((product.double() != expected).sum()),
        "digest": f"{zlib.crc32(product.numpy().tobytes()):08x}",
    }
    if not accelerator.is_accelerator(device):
        return found
    return found | {"name": accelerator.name(device), "seconds": _product_seconds(device)}


def _product_seconds(device: torch.device) -> float:
    """Return the seconds of one large product in bfloat16."""
    large = torch.ones(_TIMED_SIZE, _TIMED_SIZE, device=device, dtype=torch.bfloat16)
    for _ in range(_WARM):
        large @ large
    accelerator.synchronize(device)
    began = time.perf_counter()
    for _ in range(_TIMED):
        large @ large
    accelerator.synchronize(device)
    return (time.perf_counter() - began) / _TIMED


def _measured(order: Mapping[str, Any], listening: int | None) -> dict[str, Any]:
    """Join the group and return the all-reduce's figures."""
    limit = datetime.timedelta(seconds=order["limit"])
    on_gpu = order["backend"] == "nccl"
    if on_gpu:
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
