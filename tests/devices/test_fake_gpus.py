"""The trainer on fake CUDA tensors: each tensor of a step is on the right device, and no step waits for it.

The tensors have no data, and the other ranks do not exist. Faults of order between streams, arithmetic and
real communication show elsewhere. Programs: ``fake/train.py``, with the guard of ``fake/guard.cpp``.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCH = Path(torch.__file__).parent
WAYS = ("single", "ddp", "fsdp", "hsdp")
PRODUCTS = {
    "fp32": "torch.float32",
    "tf32": "torch.float32",
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
}

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or torch.version.cuda is not None or shutil.which("g++") is None,
    reason="the guard is for the CPU build of torch, and needs g++",
)


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled guard; one compilation for all processes of the tests and for later runs."""
    source = HERE / "fake" / "guard.cpp"
    version = torch.__version__.encode() + source.read_bytes()
    # pytest's folder of this user, which only this user can write to. With --basetemp there is none.
    base = tmp_path_factory.getbasetemp()
    shared = next((one for one in base.parents if one.name.startswith("pytest-of-")), base)
    made = shared / f"hpcrun-guard-{hashlib.sha256(version).hexdigest()[:16]}.so"
    if not made.exists():
        draft = made.with_suffix(f".{os.getpid()}")
        command = [
            "g++",
            "-shared",
            "-fPIC",
            "-O0",
            "-std=c++20",
            f"-I{TORCH}/include",
            str(source),
        ]
        links = [f"-L{TORCH}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run([*command, "-o", str(draft), *links], check=True, timeout=300)
        draft.replace(made)
    return made


@cache
def steps(guard: Path, which: str) -> list[dict[str, Any]]:
    """Train in all cases of all ways, in a process with the guard; return the results."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.devices.fake.train", which],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(guard), "LD_LIBRARY_PATH": f"{TORCH}/lib"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def wrong(step: dict[str, Any]) -> str | None:
    """Return what is wrong with a result; None if nothing is."""
    if "error" in step:
        return str(step["error"])
    if {step["loss"], *step["weights"]} != {"cuda"} or "cuda" not in step["state"]:
        return "not all of the loss, the weights and the moments are on the GPU"
    if step["fused"] and step["read"]:
        return "the host waits for the device"
    if step["multiplied"] != [PRODUCTS[step["precision"]]]:
        return f"matrices are multiplied in {step['multiplied']}"
    # The decision, once. Otherwise an optimizer reads its counts of steps, which it keeps on the CPU.
    if not step["fused"] and step["read"].count("cuda") != 1:
        return f"the host reads {step['read'].count('cuda')} numbers from the device"
    return "the step is skipped" if step["skipped"] else None


def require_right(guard: Path, way: str, which: str, count: int) -> None:
    *sound, planted = (step for step in steps(guard, which) if step["way"] == way)
    assert [step for step in sound if wrong(step)] == []
    assert len(sound) == count
    assert planted["planted"]
    # A number on the CPU where the kernel needs one on the device.
    assert "tensors on cpu and cuda" in str(wrong(planted))


@pytest.mark.parametrize("way", WAYS)
def test_each_pair_of_settings_trains_on_a_gpu(guard: Path, way: str) -> None:
    require_right(guard, way, "few", 8)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_combination_of_settings_trains_on_a_gpu(guard: Path, way: str) -> None:
    require_right(guard, way, "all", 64)
