"""Checks on the GPUs of a rank that need torch: its build sees them, and no two ranks have the same."""

import os
import socket
from typing import Any

import torch

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.errors import ClusterError
from hpcrun.cluster.hardware.devices import lists_mig, visible_gpus
from hpcrun.train.errors import NotTrainable


def require_gpu_build(config: DistributedConfig) -> None:
    """Check that torch sees a GPU where the node has one for this rank.

    Raises:
        NotTrainable: torch is built for CPUs; with the remedy.
        ClusterError: torch sees none of the GPUs; with the remedy.
    """
    if config.backend != "nccl" or torch.cuda.device_count():
        return
    where = (
        f"{socket.gethostname()}: {visible_gpus(os.environ)} GPU(s) are here for rank {config.rank}"
    )
    built = torch.version.cuda or torch.version.hip
    if built is None:
        # The build is the same on all nodes, so that no other start helps.
        raise NotTrainable(
            f"{where}, but torch {torch.__version__} is built without CUDA and ROCm; install a build for "
            "them (https://pytorch.org/get-started), or train on CPUs (--cpu)"
        )
    kind = "CUDA" if torch.version.cuda else "ROCm"
    raise ClusterError(
        f"{where}, but torch (built for {kind} {built}) sees none; in a container pass the GPUs on "
        "(apptainer: --nv, or --rocm), otherwise see whether the driver is too old for that build or "
        "CUDA_VISIBLE_DEVICES names other GPUs; or train on CPUs (--cpu)"
    )


def refuse_shared_gpus(config: DistributedConfig, store: Any) -> None:
    """Check, with the other ranks of the node, that no two have the same GPU. Collective on a node.

    Raises:
        ClusterError: on every rank of a node where two ranks have the same GPU; with the remedy.
    """
    if config.backend != "nccl":
        return
    refuse_duplicates(config, store, gpu_identity(config.device_ids[0]))


def refuse_duplicates(config: DistributedConfig, store: Any, identity: str) -> None:
    """Do what `refuse_shared_gpus` does, with the ``identity`` of this rank's GPU; empty: not known."""

    def key(local_rank: int) -> str:
        return f"hpcrun/gpu/{config.node_rank}/{local_rank}"

    store.set(key(config.local_rank), f"{config.rank} {identity}")
    found = store.multi_get([key(local) for local in range(config.num_gpus_per_node)])
    ranks_of: dict[str, list[str]] = {}
    for rank, _, theirs in (value.decode().partition(" ") for value in found):
        ranks_of.setdefault(theirs, []).append(rank)
    for theirs, ranks in ranks_of.items():
        if theirs and len(ranks) > 1:
            mig = lists_mig(os.environ)
            raise ClusterError(
                f"{socket.gethostname()}: ranks {' and '.join(ranks)} have the same GPU ({theirs}), "
                + (_MIG if mig else _BINDING)
            )


_BINDING = (
    "as srun's --gpu-bind=closest or a CUDA_VISIBLE_DEVICES by hand can do; let every rank see all GPUs of "
    "its node: take the option out, or job.srun_args=[--gpu-bind=none]"
)
_MIG = "as slices of it (MIG); NCCL joins whole GPUs only: ask for these, or for one rank a node (--gpus 1)"


def gpu_identity(device: int) -> str:
    """Return a name of the physical GPU, unique on its host; empty where the driver gives none."""
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    # Consumer cards under ROCm have no number.
    known = uuid.strip("0-") and uuid != "None"
    bus: list[Any] = [
        getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
    ]
    # Each slice of a GPU has a number, and NCCL compares the bus.
    if known and not lists_mig(os.environ):
        return f"GPU-{uuid}"
    return "" if None in bus else "PCI {:04x}:{:02x}:{:02x}".format(*bus)
