"""Throughput and MFU: the short form of ``tools/bench/gpu.py``."""

import json
import subprocess
import sys
from pathlib import Path

from gpu import speed_line

from acceptancelib.outcome import Job, Outcome

PROGRAM = Path(__file__).parents[1] / "bench" / "gpu.py"
LOW = 0.2
"""MFU below which the outcome is a warning: 0.3 to 0.6 is usual (docs/benchmarks.md)."""


def check(job: Job) -> list[Outcome]:
    """Run the parts ``speed`` and ``deterministic`` of the benchmark."""
    size = ["--sizes", "tiny", "--device", "cpu", "--no-compile", "--steps", "2"]
    if not job.simulated:
        size = ["--sizes", "1b", "--steps", "10"]
    command = [str(PROGRAM), "--parts", "speed,deterministic", "--json", *size]
    command += ["--limit", str(0.45 * job.seconds)]
    done = subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.splitlines()
    found = [json.loads(line) for line in lines]
    told = next((each for each in found if "figures" not in each), found[0] if found else {})
    again = f"run {' '.join(['tools/bench/gpu.py', *command[1:3], *size])} and read its messages"
    if "figures" not in told:
        reason = told.get("failed", f"gpu.py ended with exit code {done.returncode}")
        return [Outcome("speed", "fail", reason, again, told)]
    fast, exact = (each["figures"] for each in found)
    line, mfu = speed_line(fast), fast["mfu"]
    line += f"; {exact['step_seconds'] / fast['step_seconds']:.2f} x with train.deterministic=true"
    if job.simulated or mfu is None or mfu >= LOW:
        return [Outcome("speed", "pass", line, details=told)]
    remedy = "look for other programs on the GPU, power limits and temperature (nvidia-smi -q)"
    return [Outcome("speed", "warn", f"{line}; usual is an MFU above {LOW}", remedy, told)]
