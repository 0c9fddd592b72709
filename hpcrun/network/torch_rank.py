"""A process with torch for the checks of a node: ``python -m hpcrun.network.torch_rank``.

The process first prints a line with its versions, the number of GPUs, and the port on which it would listen
as rank 0. Then it reads one order from standard input, a matrix product or an all-reduce, and prints
its progress. The agent ends a process that hangs.
"""

import datetime
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hpcrun.devices import accelerator, vendor
from hpcrun.ranks.addresses import listen, wanted_ports
from hpcrun.ranks.interfaces import gloo_interface

_SIZE = 512
# Large enough that the launch time of the kernel does not matter.
_TIMED_SIZE, _TIMED, _WARM_UP = 4096, 20, 5
# Calls of an all-reduce.
_WARM, _FEWEST_CALLS, _MOST_CALLS = 2, 3, 200
_VALUE = 2.0


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
            _say(stage="done", cells=_measured(order, listening))
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
    for _ in range(_WARM_UP):
        large @ large
    accelerator.synchronize(device)
    began = time.perf_counter()
    for _ in range(_TIMED):
        large @ large
    accelerator.synchronize(device)
    return (time.perf_counter() - began) / _TIMED


def _measured(order: Mapping[str, Any], listening: int | None) -> list[tuple[int, float]]:
    """Join the group; return bytes and seconds of an all-reduce, for each size."""
    limit = datetime.timedelta(seconds=order["limit"])
    device = torch.device("cpu")
    if order["backend"] == "nccl":
        device = accelerator.device(order["local"])
        accelerator.make_current(device)
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
    dist.barrier()
    _say(stage="joined")
    found = list(_cells(order, device))
    dist.barrier()
    # srun mixes long lines of several tasks.
    return found if order["rank"] == 0 else []


def _cells(order: Mapping[str, Any], device: torch.device) -> Iterator[tuple[int, float]]:
    """Yield the times of an all-reduce, until a call of the next size would take too long."""
    sizes = order["sizes"]
    for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
        seconds = _timed(size, order, device)
        yield size, seconds
        if seconds * following / size > order["longest"]:
            break


def _timed(size: int, order: Mapping[str, Any], device: torch.device) -> float:
    """Return the lower quartile of the seconds of some calls with ``size`` bytes.

    A call takes as long as on the slowest rank. Other work on the node only makes calls longer, so the lower
    quartile varies less.

    Raises:
        ValueError: the first call has a wrong result.
    """
    ranks = order["ranks"]
    values = torch.full((size // 4,), _VALUE, device=device)

    def seconds_of(repeats: int) -> float:
        dist.barrier()
        accelerator.synchronize(device)
        begun = time.perf_counter()
        for _ in range(repeats):
            # In place, as a training does; only the values of the first call are compared.
            dist.all_reduce(values)
        accelerator.synchronize(device)
        return (time.perf_counter() - begun) / repeats

    first = _most(seconds_of(1), device)
    if _most(int((values != _VALUE * ranks).sum()), device):
        raise ValueError(f"the all-reduce over {ranks} ranks has a wrong result")
    usual = _most(seconds_of(_WARM if first < order["seconds"] else 1), device)
    repeats = int(min(_MOST_CALLS, max(_FEWEST_CALLS, order["seconds"] / max(usual, 1e-7))))
    times = torch.tensor([seconds_of(1) for _ in range(repeats)], dtype=torch.float64)
    slowest = times.to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(sorted(slowest.tolist())[repeats // 4])


def _most(value: float, device: torch.device) -> float:
    """Return the largest of the values of all ranks."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
