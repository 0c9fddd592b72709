"""A small matrix product on every device: ``python -m hpcrun.network.preflight.gemm``, with torch.

The entries are small integers, so that each sum is exact in 32-bit floats (and in TF32), in any order. Each
sound device of any model therefore returns the same bits. Prints one JSON line per device.
"""

import json
import sys
import time
import zlib
from collections.abc import Mapping

import torch

from hpcrun.devices import accelerator, vendor

_SIZE = 512
# Large enough that the launch time of the kernel does not matter.
_TIMED_SIZE, _TIMED, _WARM = 4096, 20, 5


def main() -> None:
    """Multiply on each visible GPU, or on the CPU without a GPU or with the argument ``cpu``."""
    torch.set_num_threads(1)
    gpus = 0 if sys.argv[1:] == ["cpu"] else accelerator.count()
    _say(vendor.versions())
    devices = [accelerator.device(index) for index in range(gpus)] or [torch.device("cpu")]
    left, right = _matrix(7, 13), _matrix(5, 11)
    expected = left.double() @ right.double()
    for device in devices:
        try:
            _say({"device": str(device), **_multiply(device, left, right, expected)})
        except RuntimeError as error:
            _say({"device": str(device), "problem": " ".join(str(error).split())[:300]})


def _matrix(row: int, column: int) -> torch.Tensor:
    """Return a matrix of integers from -8 to 8."""
    steps = torch.arange(_SIZE)
    return ((steps[:, None] * row + steps[None, :] * column) % 17 - 8).float()


def _multiply(
    device: torch.device, left: torch.Tensor, right: torch.Tensor, expected: torch.Tensor
) -> dict[str, object]:
    began = time.perf_counter()
    product = (left.to(device) @ right.to(device)).cpu()
    seconds = time.perf_counter() - began
    name = "cpu"
    if accelerator.is_accelerator(device):
        name = accelerator.name(device)
        seconds = _timed(device)
    return {
        "name": name,
        "wrong": int((product.double() != expected).sum()),
        "digest": f"{zlib.crc32(product.numpy().tobytes()):08x}",
        "seconds": seconds,
    }


def _timed(device: torch.device) -> float:
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


def _say(record: Mapping[str, object]) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
