"""The process of a rank for a whole search: ``python -m hpcrun.network.tune.worker``.

It imports torch once and forks a process for each trial; the parent never starts CUDA or a network library.
Orders are JSON lines on standard input, answers are JSON lines on standard output.
"""

import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from hpcrun.devices import accelerator, vendor
from hpcrun.ranks.interfaces import own_interfaces
from hpcrun.run.endings import node_name
from hpcrun.slurm.node_setup import die_with_parent

_TICK = 0.2


class Worker:
    """One rank: at most one process of a trial at a time."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._number = 0
        self._child: int | None = None
        self._orders = -1

    def say(self, facts: Mapping[str, Any]) -> None:
        """Print one answer."""
        line = json.dumps({"rank": self.rank, "trial": self._number, **facts}) + "\n"
        os.write(1, line.encode())

    def hello(self) -> None:
        """Report the facts of this node that decide which settings are tried."""
        devices = Path("/sys/class/infiniband")
        self.say(
            {
                "type": "hello",
                "host": node_name(),
                "interfaces": sorted(own_interfaces()),
                "rdma": devices.is_dir() and any(devices.iterdir()),
                "nccl": vendor.nccl_version(),
            }
        )

    def obey(self, order: Mapping[str, Any]) -> None:
        """Carry out one order."""
        if order["type"] == "trial":
            self.stop()
            self._number = order["number"]
            self._fork(order["env"])
        elif order["type"] == "stop":
            self.stop()
            self.say({"type": "stopped"})
        elif self._child is not None:
            os.write(self._orders, json.dumps(order).encode() + b"\n")

    def look(self) -> None:
        """Report a trial's process that has ended by itself, which is always a failure."""
        if self._child is None:
            return
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if pid:
            self._child = None
            os.close(self._orders)
            code = os.waitstatus_to_exitcode(status)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            self.say({"type": "failed", "problem": f"its process ended with {how}"})

    def stop(self) -> None:
        """End the process of the trial."""
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            os.close(self._orders)
            self._child = None

    def _fork(self, env: Mapping[str, str]) -> None:
        reader, self._orders = os.pipe()
        parent = os.getpid()
        self._child = os.fork()
        if self._child:
            os.close(reader)
            return
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.environ.update(env)
        with os.fdopen(reader) as orders:
            run_trial(self.rank, self.world, orders, self.say)
        # The store of rank 0 stays for the others until the order to stop.
        signal.pause()
        os._exit(1)


def lines(worker: Worker) -> Iterator[dict[str, Any]]:
    """Yield the orders until they end; between orders, check the trial's process."""
    text = b""
    while True:
        if not select.select([0], [], [], _TICK)[0]:
            worker.look()
            continue
        read = os.read(0, 1 << 16)
        if not read:
            return
        *whole, text = (text + read).split(b"\n")
        yield from map(json.loads, whole)


def main() -> None:
    """Carry out orders until standard input ends."""
    worker = Worker(int(os.environ["HPCRUN_TUNE_RANK"]), int(os.environ["HPCRUN_TUNE_RANKS"]))
    worker.hello()
    for order in lines(worker):
        worker.obey(order)
    worker.stop()
    sys.stdout.flush()
    os._exit(0)


_WARM = 2
_MOST_CALLS = 200
_FEWEST_CALLS = 3
_CONNECT = 15.0
_LARGE = 1 << 20
# Seconds: a size is skipped if one call would take longer.
_LONGEST = 2.0
_VALUE = 2.0


class TrialGroup:
    """The process group of a trial and the buffers for its calls."""

    def __init__(self, rank: int, world: int, device: torch.device) -> None:
        self.rank, self.world, self.device = rank, world, device

    def prepare(
        self, collective: str, size: int
    ) -> tuple[int, Callable[[], object], Callable[[], int]]:
        """Return the real size in bytes, a call of the collective, and a count of its wrong elements."""
        n = self.world
        # As nccl-tests has it: each rank's share has the same number of elements.
        share = max(1, size // 4 // n)
        split = collective in ("all_gather", "reduce_scatter", "alltoall")
        whole = torch.full((share * n if split else size // 4,), _VALUE, device=self.device)
        part = torch.full((share,), _VALUE, device=self.device)
        came = torch.zeros_like(whole) if collective in ("alltoall", "sendrecv") else whole
        # In place, as a training does; the values grow, and only those of the first call are compared.
        calls: dict[str, tuple[Callable[[], object], torch.Tensor, int]] = {
            "all_reduce": (lambda: dist.all_reduce(whole), whole, n),
            "all_gather": (lambda: dist.all_gather_into_tensor(whole, part), whole, 1),
            "reduce_scatter": (lambda: dist.reduce_scatter_tensor(part, whole), part, n),
            "broadcast": (lambda: dist.broadcast(whole, 0), whole, 1),
            "alltoall": (lambda: dist.all_to_all_single(came, whole), came, 1),
            "sendrecv": (lambda: self._to_next(whole, came), came, 1),
        }
        call, result, factor = calls[collective]
        return whole.numel() * 4, call, lambda: int((result != _VALUE * factor).sum().item())

    def _to_next(self, whole: torch.Tensor, came: torch.Tensor) -> None:
        sends = dist.P2POp(dist.isend, whole, (self.rank + 1) % self.world)
        receives = dist.P2POp(dist.irecv, came, (self.rank - 1) % self.world)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    def agreed(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return float(tensor.item())

    def finish(self) -> None:
        """Wait for the work of the device."""
        accelerator.synchronize(self.device)


def measure(group: TrialGroup, collective: str, size: int, seconds: float) -> dict[str, Any]:
    """Time a collective: the lower quartile of the calls, each call as long as on the slowest rank.

    Args:
        seconds: approximate duration; at least a few calls are made.
    """
    real, call, wrong = group.prepare(collective, size)
    begun = time.perf_counter()
    call()
    group.finish()
    # All ranks make the same number of calls.
    first = group.agreed(time.perf_counter() - begun)
    warm = _WARM if first < seconds else 1
    if group.agreed(wrong()):
        raise ValueError(f"wrong results of {collective} with {real} bytes")
    begun = time.perf_counter()
    for _ in range(warm):
        call()
    group.finish()
    usual = group.agreed(time.perf_counter() - begun) / warm
    calls = int(min(_MOST_CALLS, max(_FEWEST_CALLS, seconds / max(usual, 1e-7))))
    calls = int(group.agreed(calls))
    times = []
    for _ in range(calls):
        dist.barrier()
        group.finish()
        begun = time.perf_counter()
        call()
        group.finish()
        times.append(time.perf_counter() - begun)
    slowest = torch.tensor(times, dtype=torch.float64, device=group.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {
        "type": "cell",
        "collective": collective,
        "size": real,
        # Other work on the node only makes calls longer, so the lower quartile varies less.
        "seconds": sorted(slowest.tolist())[calls // 4],
    }


def measure_all(
    group: TrialGroup, order: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]
) -> None:
    """Measure each collective over the sizes, up to the size that takes too long."""
    for collective in order["collectives"]:
        sizes: Sequence[int] = order["sizes"]
        for size, following in zip(sizes, [*sizes[1:], sizes[-1]], strict=True):
            try:
                found = measure(group, collective, size, order["seconds"])
            except RuntimeError as error:
                # Where no rank has begun the call, all ranks come here.
                if "not support" not in str(error).lower():
                    raise
                break
            say(found)
            # Below that a call's time does not grow with the size.
            if size >= _LARGE and found["seconds"] * following / size > _LONGEST:
                break


def meet(order: Mapping[str, Any], rank: int, world: int, store: TCPStore | None) -> Any:
    """Return the store of rank 0, at the first of its addresses that answers."""
    if store is not None:
        return store
    words = "no address"
    for address in order["addresses"]:
        try:
            return TCPStore(
                address,
                order["port"],
                world,
                False,
                timedelta(seconds=_CONNECT),
                wait_for_workers=False,
            )
        except (RuntimeError, OSError) as error:
            words = f"{address}: {' '.join(str(error).split())[:150]}"
    raise RuntimeError(f"rank {rank} does not reach rank 0: {words}")


def run_trial(
    rank: int, world: int, orders: TextIO, say: Callable[[Mapping[str, Any]], None]
) -> None:
    """Open a store on rank 0, read the order with its address, connect to the other ranks, and measure.

    Args:
        orders: the stream of the order.
    """
    try:
        store = None
        if rank == 0:
            store = TCPStore("0.0.0.0", 0, world, True, wait_for_workers=False)
            addresses = [one for own in own_interfaces().values() for one in own]
            say({"type": "store", "port": store.port, "addresses": [*addresses, "127.0.0.1"]})
        order = json.loads(orders.readline())
        torch.set_num_threads(1)
        # The newer names of these calls are not in the oldest torch that is supported.
        warnings.simplefilter("ignore", FutureWarning)
        device = torch.device("cpu")
        if order["backend"] == "nccl":
            device = accelerator.device(int(os.environ["HPCRUN_TUNE_LOCAL"]))
            accelerator.make_current(device)
        dist.init_process_group(
            order["backend"],
            store=PrefixStore("tune", meet(order, rank, world, store)),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=order["patience"]),
        )
        measure_all(TrialGroup(rank, world, device), order, say if rank == 0 else lambda _: None)
        dist.barrier()
    except Exception as error:
        say(
            {
                "type": "failed",
                "problem": " ".join(f"{type(error).__name__}: {error}".split())[:300],
            }
        )
    else:
        say({"type": "done"})


if __name__ == "__main__":
    main()
