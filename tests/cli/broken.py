"""A script that fails in a chosen way: python broken.py WAY."""

import argparse
import ctypes
import datetime
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

RANK, NODE = int(os.environ["RANK"]), int(os.environ["SLURM_NODEID"])
FEW_SECONDS = datetime.timedelta(seconds=8)


def killed() -> None:
    """Be killed, as the kernel does."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def segmentation() -> None:
    """Read at address 0 in compiled code."""
    if RANK == 1:
        ctypes.string_at(0)
    time.sleep(60)


def disk() -> None:
    """Write to a full device."""
    with Path("/dev/full").open("w") as full:
        full.write("x")


def memory() -> None:
    """Allocate more than the limit of the process."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(4 << 30)


def files() -> None:
    """Open more files than the process may."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    print([Path("/dev/null").open() for _ in range(64)])  # noqa: SIM115


def module() -> None:
    """Import a module that the second node lacks."""
    if NODE == 1:
        import absent_on_this_node  # type: ignore[import-not-found]  # noqa: F401
    print("imported")
    time.sleep(60)


def arguments() -> None:
    """Refuse an argument that old launchers pass."""
    argparse.ArgumentParser().parse_args(["--local_rank=0"])


def port() -> None:
    """Use a rendezvous port that another process holds."""
    import torch.distributed as dist

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)


def world() -> None:
    """Wait for one rank more than exist."""
    import torch.distributed as dist

    size = int(os.environ["WORLD_SIZE"]) + 1
    dist.TCPStore(
        os.environ["MASTER_ADDR"],
        _another_port(),
        size,
        RANK == 0,
        FEW_SECONDS,
        wait_for_workers=True,
    )


def hang() -> None:
    """Leave a collective to the other rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = dist.new_group(timeout=FEW_SECONDS)
    if RANK == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(8), group=group)


def collectives() -> None:
    """Reduce tensors of different sizes."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = dist.new_group(timeout=FEW_SECONDS)
    dist.all_reduce(torch.ones(8 if RANK else 400_000), group=group)


def model() -> None:
    """Load the weights of another model."""
    import torch

    torch.nn.Linear(3, 4).load_state_dict(torch.nn.Linear(3, 5).state_dict())


def loopback() -> None:
    """Let gloo use the address of the host name."""
    import torch.distributed as dist

    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    dist.init_process_group("gloo", timeout=FEW_SECONDS)


def sleep() -> None:
    """Work until the job ends."""
    time.sleep(600)


def greedy() -> None:
    """Use more memory than the job has."""
    taken = bytes([1]) * (500 << 20)
    time.sleep(60)
    print(len(taken))


def _another_port() -> int:
    return int(os.environ["MASTER_PORT"]) + 1


if __name__ == "__main__":
    globals()[sys.argv[1]]()
