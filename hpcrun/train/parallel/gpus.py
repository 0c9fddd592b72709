"""GPU checks that need torch: torch sees the rank's GPU, and no two ranks share a GPU."""

import os
import socket
from typing import Any

import torch

from hpcrun.devices import accelerator, vendor
from hpcrun.devices.devices import lists_mig, visible_gpus
from hpcrun.errors import ClusterError, NotTrainable
from hpcrun.ranks.distributed import DistributedConfig


def require_gpu_build(config: DistributedConfig) -> None:
    """Check that torch sees a GPU if the node has one for this rank.

    Raises:
        NotTrainable: torch is built for CPUs; with the remedy.
        ClusterError: torch sees none of the GPUs; with the remedy.
    """
    if config.backend != "nccl" or accelerator.count():
        return
    where = f"{socket.gethostname()}: the node has {visible_gpus(os.environ)} GPU(s) for rank {config.rank}"
    built = vendor.build()
    if built is None:
        # The build is the same on all nodes, so another start cannot help.
        raise NotTrainable(
            f"{where}, but torch {torch.__version__} is built without CUDA and ROCm; install a build with "
            "one of them (https://pytorch.org/get-started), or train on CPUs (--cpu)"
        )
    raise ClusterError(
        f"{where}, but torch (built for {' '.join(built)}) sees none; in a container pass the GPUs through "
        "(apptainer: --nv, or --rocm); otherwise check that the driver is new enough for this build and "
        "that CUDA_VISIBLE_DEVICES names the right GPUs; or train on CPUs (--cpu)"
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
    """Do the check of `refuse_shared_gpus` for ``identity``, the GPU of this rank; empty: unknown."""

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
                f"{socket.gethostname()}: ranks {' and '.join(ranks)} have the same GPU ({theirs}); "
                + (_MIG if mig else _BINDING)
            )


_BINDING = (
    "srun's --gpu-bind=closest or a manual CUDA_VISIBLE_DEVICES can cause this; let every rank see all GPUs "
    "of its node: remove the option, or set job.srun_args=[--gpu-bind=none]"
)
_MIG = (
    "they use slices of it (MIG), but NCCL needs whole GPUs: request whole GPUs, or one rank per node "
    "(--gpus 1)"
)


def gpu_identity(device: int) -> str:
    """Return a name of the physical GPU, unique on its host; empty if the driver gives none."""
    properties = accelerator.properties(accelerator.device(device))
    uuid = str(getattr(properties, "uuid", ""))
    # Consumer cards under ROCm have no UUID.
    known = uuid.strip("0-") and uuid != "None"
    bus: list[Any] = [
        getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
    ]
    # With MIG each slice has its own UUID, but NCCL compares the PCI bus address.
    if known and not lists_mig(os.environ):
        return f"GPU-{uuid}"
    return "" if None in bus else "PCI {:04x}:{:02x}:{:02x}".format(*bus)
