"""A small matrix product on every device: ``python -m hpcrun.preflight.gemm``, with torch.

The entries are small integers, so that each sum is exact in 32-bit floats (and in TF32), in any order.
Each sound device therefore returns the same bits, whatever its model. One JSON line a device.
"""

import json
import sys
import time
import zlib
from collections.abc import Callable

import torch

_SIZE = 512
# Large enough that the launch of a kernel does not count.
_TIMED_SIZE, _TIMED, _WARM = 4096, 20, 5


def main() -> None:
    """Multiply on each visible GPU, or on the CPU where there is none or the argument is ``cpu``."""
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available() and sys.argv[1:] != ["cpu"]
    nccl = _nccl_version()
    _say({"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl})
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if cuda else ["cpu"]
    left, right = _matrix(7, 13), _matrix(5, 11)
    expected = left.double() @ right.double()
    for name in names:
        try:
            _say({"device": name, **_multiply(torch.device(name), left, right, expected)})
        except RuntimeError as error:
            _say({"device": name, "problem": " ".join(str(error).split())[:300]})


def _nccl_version() -> str | None:
    """Return NCCL's version, or None where torch was built without NCCL."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    return ".".join(map(str, version()))


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
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
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
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_TIMED):
        large @ large
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / _TIMED


def _say(record: dict[str, object]) -> None:
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
