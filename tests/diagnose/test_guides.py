"""The messages that guides to distributed training list get their cause and remedy."""

import pytest

from hpcrun.diagnose.finding import find_cause
from hpcrun.diagnose.read_log import labeled

MESSAGES = [
    # Message, entry, a word of the remedy.
    ("Address already in use", "port-in-use", "choose a free port"),
    ("OSError: [Errno 98] Address already in use", "port-in-use", "choose a free port"),
    ("RuntimeError: CUDA out of memory", "gpu-out-of-memory", "batch size"),
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "gpu-out-of-memory",
        "checkpoint activations",
    ),
    ("NCCL error: unhandled system error", "nccl-system", "NCCL_IB_DISABLE=1"),
    (
        "RuntimeError: NCCL error in: /x/ProcessGroupNCCL.cpp:1333, unhandled system error",
        "nccl-system",
        "NCCL_SOCKET_IFNAME",
    ),
    ("NCCL error: invalid usage", "nccl-usage", "torch.cuda.set_device(local_rank)"),
    (
        "RuntimeError: NCCL error in: /x/ProcessGroupNCCL.cpp:825, invalid usage, NCCL version 2.7.8",
        "nccl-usage",
        "gloo",
    ),
    ("Mismatch in world size", "world-size", "WORLD_SIZE"),
    ("RuntimeError: World size mismatch: expected 8, got 4", "world-size", "WORLD_SIZE"),
    ("RuntimeError: world size 8 of rank 1 does not match rank 0 (4)", "world-size", "WORLD_SIZE"),
    ("RuntimeError: expected 8 ranks, but 4 joined", "world-size", "nodes"),
    ("AssertionError: only 4 ranks joined, 8 ranks expected", "world-size", "nodes"),
    ("RuntimeError: Timed out waiting for clients", "ranks-missing", "WORLD_SIZE"),
    ("ValueError: number of ranks 4 does not match world size 8", "world-size", "WORLD_SIZE"),
    (
        "RuntimeError: Mesh should not be bigger than default world size 2, but found 4 ranks!",
        "world-size",
        "meshes",
    ),
    (
        "ValueError: the new group's world size should be less or equal to the world size set by "
        "init_process_group",
        "world-size",
        "groups",
    ),
    (
        "ValueError: The arg 'group_size' (3) must not exceed the world size (1)",
        "world-size",
        "groups",
    ),
    (
        "AssertionError: world size (6) is not divisible by tensor parallel size 4",
        "world-size",
        "nodes",
    ),
    (
        "torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 1/2 clients joined",
        "ranks-missing",
        "WORLD_SIZE",
    ),
    (
        "RuntimeError: Local world size at save time was 4, but at load time was 2",
        "checkpoint-other-ranks",
        "number of ranks",
    ),
    (
        "RuntimeError: CUDA error: invalid configuration argument",
        "kernel-configuration",
        "nvidia-smi",
    ),
    (
        "torch.AcceleratorError: HIP error: invalid configuration argument",
        "kernel-configuration",
        "batch",
    ),
    (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
        "ddp-unused-parameters",
        "find_unused_parameters=true",
    ),
    ("RuntimeError: Expected to have finished reduction", "ddp-unused-parameters", "remove them"),
    (
        "RuntimeError: device_ids can only be None or contain a single device",
        "ddp-device-ids",
        "device_ids=[local_rank]",
    ),
    (
        "ValueError: DistributedDataParallel device_ids and output_device arguments only work with "
        "single-device/multiple-device GPU modules or CPU modules, but got device_ids [0]",
        "ddp-device-ids",
        "one process per GPU",
    ),
    ("AttributeError: 'TrainerDDP' has no attribute 'epoch'", "object-attribute", "__init__"),
    (
        "AttributeError: type object 'Trainer' has no attribute 'epoch'",
        "object-attribute",
        "rank 0",
    ),
    (
        "AttributeError: 'DataParallel' object has no attribute 'encode'",
        "wrapper-attribute",
        "model.module",
    ),
    ("NCCL timeout", "collective-timeout", "the rank that is furthest behind"),
    (
        "[E ProcessGroupNCCL.cpp:828] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(",
        "collective-timeout",
        "the rank that is furthest behind",
    ),
    (
        "ValueError: Invalid rank 5, rank should be in the interval [0, 1]",
        "rank-out-of-range",
        "launcher",
    ),
    (
        "ValueError: batch_sampler option is mutually exclusive with batch_size, shuffle",
        "sampler-and-shuffle",
        "DistributedSampler(shuffle=True)",
    ),
    (
        "AttributeError: 'SequentialSampler' object has no attribute 'set_epoch'",
        "sampler-set-epoch",
        "sampler=DistributedSampler(dataset)",
    ),
    (
        "RuntimeError: Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is 1. "
        "Please use torch.load with map_location to map your storages to an existing device.",
        "map-location",
        "map_location",
    ),
    (
        "RuntimeError: Attempting to deserialize object on CUDA device 0 but torch.cuda.device_count() is 0.",
        "map-location",
        "job.gpus",
    ),
    *(
        (
            f"RuntimeError: Attempting to deserialize object on a {name} device but "
            f"torch.{name.lower()}.is_available() is False.",
            "map-location",
            "map_location",
        )
        for name in ("CUDA", "MPS", "HPU", "XPU")
    ),
    (
        "RuntimeError: don't know how to restore data location of UntypedStorage (tagged with mps:0)",
        "map-location",
        "map_location",
    ),
    ("RuntimeError: CUDA error: invalid device ordinal", "device-ordinal", "local_rank"),
]


@pytest.mark.parametrize(("message", "entry", "remedy"), MESSAGES, ids=lambda text: text[:60])
def test_a_message_of_a_guide_gets_its_cause_and_remedy(
    message: str, entry: str, remedy: str
) -> None:
    raised = message.split(" ")[0].endswith("Error:")
    text = f"Traceback (most recent call last):\n{message}" if raised else message
    found = find_cause(labeled(line, "job.log", at) for at, line in enumerate(text.splitlines(), 1))
    assert found is not None
    assert found.id == entry
    assert remedy in found.remedy
