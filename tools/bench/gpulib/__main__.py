"""Run one part in a separate process: ``python gpulib JOB RESULT``; both are JSON, RESULT is a file.

Memory, compiled code and a failed device state of a part end with its process.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3]), str(HERE.parents[1])]
# cuBLAS is deterministic with a fixed workspace only, and reads this variable at its first use.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402

from gpulib.parts import PARTS, Job  # noqa: E402


def perform(job: Job) -> dict[str, Any]:
    """Return the part's figures and the machine, or the reason for missing figures."""
    device = torch.device(job.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return {"refused": "torch sees no GPU here; --sizes tiny --device cpu tries the path"}
        if device.index is not None and device.index >= torch.cuda.device_count():
            return {"refused": f"there is no {device}; torch sees {torch.cuda.device_count()} GPUs"}
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    try:
        return {"machine": machine(device), "figures": PARTS[job.part](job, device)}
    except Exception as error:  # any failure: the other parts can still run
        traceback.print_exc()
        memory = isinstance(error, torch.OutOfMemoryError)
        lines = str(error).strip().splitlines() or [""]
        return {"failed": f"{type(error).__name__}: {lines[0][:300]}", "memory": memory}


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device and torch's build."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "gigabytes": torch.cuda.get_device_properties(device).total_memory / 1e9
        if on_gpu
        else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


if __name__ == "__main__":
    told = perform(Job(**json.loads(sys.argv[1])))
    Path(sys.argv[2]).write_text(json.dumps(told), encoding="utf-8")
