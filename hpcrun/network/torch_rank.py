"""A process with torch for the checks of a node: ``python -m hpcrun.network.torch_rank``.

The process first prints a line with its versions, the number of GPUs, and the port on which it would listen
as rank 0. Then it reads one order from standard input, a matrix product or collectives, and prints its
progress. The agent ends a process that hangs.
"""

import datetime
import json
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from hpcrun.devices import accelerator, vendor
from hpcrun.network.measurements import MIB
from hpcrun.ranks.addresses import listen, wanted_ports
from hpcrun.ranks.interfaces import gloo_interface

_SIZE = 512
# Large enough that the launch time of the kernel does not matter.
_TIMED_SIZE, _TIMED, _WARM_UP = 4096, 20, 5
# Calls of a collective.
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


def _measured(order: Mapping[str, Any], listening: int | None) -> list[tuple[str, int, float]]:
    """Join the group; return name, bytes and seconds of a call, for each collective and size."""
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
    # The newer names of these calls are not in the oldest torch that is supported.
    warnings.simplefilter("ignore", FutureWarning)
    found = list(_cells(order, device))
    dist.barrier()
    # srun mixes long lines of several tasks.
    return found if order["rank"] == 0 else []


def _cells(order: Mapping[str, Any], device: torch.device) -> Iterator[tuple[str, int, float]]:
    """Yield the times of each collective, until a call of the next size would take too long."""
    sizes = order["sizes"]
    for collective in order["collectives"]:
        for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
            try:
                real, seconds = _timed(collective, size, order, device)
            except RuntimeError as error:
                # Where no rank has begun the call, all ranks come here.
                if "not support" not in str(error).lower():
                    raise
                break
            yield collective, real, seconds
            # Below 1 MiB a call's time does not grow with the size.
            if size >= MIB and seconds * following / size > order["longest"]:
                break


def _timed(
    collective: str, size: int, order: Mapping[str, Any], device: torch.device
) -> tuple[int, float]:
    """Return the bytes of the whole array, and the lower quartile of the seconds of some calls.

    A call takes as long as on the slowest rank. Other work on the node only makes calls longer, so the lower
    quartile varies less.

    Raises:
        ValueError: the first call has a wrong result.
    """
    ranks = order["ranks"]
    # As nccl-tests has it: each rank's share has the same number of elements.
    share = max(1, size // 4 // ranks)
    count = size // 4 if collective == "all_reduce" else share * ranks
    whole = torch.full((count,), _VALUE, device=device)
    part = torch.full((share,), _VALUE, device=device)
    # In place, as a training does; the values grow, and only those of the first call are compared.
    calls: dict[str, tuple[Callable[[], object], torch.Tensor, int]] = {
        "all_reduce": (lambda: dist.all_reduce(whole), whole, ranks),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, part), whole, 1),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), part, ranks),
    }
    call, result, factor = calls[collective]

    def seconds_of(repeats: int) -> float:
        dist.barrier()
        accelerator.synchronize(device)
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        accelerator.synchronize(device)
        return (time.perf_counter() - begun) / repeats

    first = _most(seconds_of(1), device)
    if _most(int((result != _VALUE * factor).sum()), device):
        raise ValueError(f"the {collective} over {ranks} ranks has a wrong result")
    usual = _most(seconds_of(_WARM if first < order["seconds"] else 1), device)
    repeats = int(min(_MOST_CALLS, max(_FEWEST_CALLS, order["seconds"] / max(usual, 1e-7))))
    times = torch.tensor([seconds_of(1) for _ in range(repeats)], dtype=torch.float64)
    slowest = times.to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return whole.numel() * 4, sorted(slowest.tolist())[repeats // 4]


def _most(value: float, device: torch.device) -> float:
    """Return the largest of the values of all ranks."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
