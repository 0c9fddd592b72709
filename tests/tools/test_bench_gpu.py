"""tools/bench/gpu.py: its requirements, and failed parts."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools" / "bench"
if str(BENCH) not in sys.path:
    sys.path.insert(0, str(BENCH))

import gpu  # noqa: E402
from gpulib.sizes import BF16, FP32, SIZES, kept_in  # noqa: E402


def test_a_python_without_requirements_gets_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-S", BENCH / "gpu.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"gpu: {sys.executable} has no torch, numpy, orjson, pydantic, tqdm, xxhash, yaml; {gpu.REMEDY}\n"
    )


def test_the_parts_import_no_other_dependency_of_the_package() -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[1:3]; "
        "sys.modules.update(dict.fromkeys(sys.argv[3:])); import gpulib.parts"
    )
    others = ["submitit", "h5py", "rich", "psutil", "matplotlib", "scipy", "safetensors"]
    subprocess.run([sys.executable, "-c", program, BENCH, ROOT, *others], check=True)


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> int:
    """Run gpu.py's main with ``answer`` instead of the measuring processes."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    monkeypatch.setattr(gpu, "run_part", answer)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    return gpu.main()


MACHINE = {"device": "NVIDIA X", "gigabytes": 80.0, "torch": "2.13", "cuda": "13.0"}
FIGURES = {
    **{"parameters": 10**9, "weights": "fp32", "batch": 8, "context": 64, "step_seconds": 0.1},
    **{"tokens_per_second": 5120.0, "mfu": 0.5, "peak_gigabytes": 20.0, "first_step_seconds": 9.0},
}


def test_a_failed_part_does_not_affect_the_other_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "speed": {"machine": MACHINE, "figures": FIGURES},
        "deterministic": {"failed": "RuntimeError: no such kernel"},
    }
    wanted = ["--parts", "speed,deterministic", "--sizes", "1b"]
    assert run(wanted, monkeypatch, lambda job, *_: told[job["part"]]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "NVIDIA X, 80 GB, torch 2.13, CUDA 13.0",
        "1.000 B parameters, weights in fp32, batch of 8 x 64: step 100.0 ms, 5,120 tokens/s, MFU 50.0%, "
        "peak memory 20.0 GB; first step 9.0 s",
    ]
    last = "gpu: 1 failed: deterministic 1b: RuntimeError: no such kernel"
    assert said.err.splitlines()[-1] == last
    told["deterministic"] = told["speed"]
    assert run([*wanted, "--json"], monkeypatch, lambda job, *_: told[job["part"]]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["part"] for line in lines] == ["speed 1b", "deterministic 1b"]


def test_a_wrong_restore_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {**FIGURES, "wrong": "the restored weights differ"}
    told = {"machine": MACHINE, "figures": figures}
    assert run(["--parts", "speed", "--sizes", "1b"], monkeypatch, lambda *_: told) == 1


def test_a_part_out_of_memory_repeats_with_half_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[int] = []

    def attempt(job: dict[str, Any], *_: Any) -> dict[str, Any]:
        batches.append(job["batch"])
        return {"failed": "OutOfMemoryError: CUDA out of memory.", "memory": True}

    assert run(["--parts", "speed", "--sizes", "1b"], monkeypatch, attempt) == 2
    assert batches == [8, 4, 2, 1]


def test_the_precision_of_the_weights_fits_the_device() -> None:
    free = {"A100 40 GB": 42e9, "H100": 83.5e9, "H200": 149e9}
    assert {name: kept_in(SIZES["7b"], size) for name, size in free.items()} == {
        "A100 40 GB": None,
        "H100": "bf16",
        "H200": "fp32",
    }
    assert {kept_in(SIZES["1b"], size) for size in free.values()} == {"fp32"}
    assert SIZES["7b"].parameters * BF16 < 57e9 < 113e9 > SIZES["7b"].parameters * FP32
