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
    """Run the part ``speed`` of the benchmark."""
    size = ["--sizes", "tiny", "--device", "cpu", "--no-compile", "--steps", "2"]
    if not job.simulated:
        size = ["--sizes", "1b", "--steps", "10"]
    command = [str(PROGRAM), "--parts", "speed", "--json", "--limit", str(0.9 * job.seconds), *size]
    done = subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.splitlines()
    told = json.loads(lines[-1]) if lines else {}
    again = f"run {' '.join(['tools/bench/gpu.py', *command[1:3], *size])} and read its messages"
    if "figures" not in told:
        reason = told.get("failed", f"gpu.py ended with exit code {done.returncode}")
        return [Outcome("speed", "fail", reason, again, told)]
    line, mfu = speed_line(told["figures"]), told["figures"]["mfu"]
    if job.simulated or mfu is None or mfu >= LOW:
        return [Outcome("speed", "pass", line, details=told)]
    remedy = "look for other programs on the GPU, power limits and temperature (nvidia-smi -q)"
    return [Outcome("speed", "warn", f"{line}; usual is an MFU above {LOW}", remedy, told)]
