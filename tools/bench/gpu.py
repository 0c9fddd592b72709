#!/usr/bin/env python3
"""Measure one GPU with hpcrun's trainer: throughput, MFU, memory, and checkpoint cost.

Needs a Python with hpcrun's requirements. Each part runs in a separate process: a failed part does not
affect the others. tools/gpu_acceptance.py checks the results of a GPU:

speed        language models of about 1 and 7 billion parameters (bf16, torch.compile, fused AdamW) on
             random tokens; weights in fp32 if they fit with gradients and moments, otherwise in bf16
deterministic  the same with train.deterministic=true
checkpoint   time that an asynchronous checkpoint of the first size stops training, and its restore

Figures are printed as they come; progress goes to stderr. If activations do not fit, the
batch is halved. Exit code 1: a part failed or found a difference; 2: nothing could be measured.

    tools/bench/gpu.py                                   # one GPU; minutes, most of them compiling
    tools/bench/gpu.py --sizes 1b --dir /scratch/bench   # folder for checkpoints of 12 GB each
    tools/bench/gpu.py --sizes tiny --device cpu         # the same path on a machine without a GPU
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpulib.sizes import SIZES

PARTS = ("speed", "deterministic", "checkpoint")
NEEDED = ("torch", "numpy", "orjson", "pydantic", "tqdm", "xxhash", "yaml")
REMEDY = "run this with the Python of hpcrun's environment"
Told = dict[str, Any]


def jobs(wanted: argparse.Namespace) -> list[Told]:
    """Return the parts to run, the fast parts first."""
    common = {
        "device": wanted.device,
        "steps": wanted.steps,
        "compiled": not wanted.no_compile,
        "folder": "" if wanted.dir is None else str(wanted.dir.resolve()),
    }
    # All parts of the first size first: larger sizes take longest, and may not fit.
    order = [(part, wanted.sizes[0]) for part in PARTS]
    order += [(part, size) for size in wanted.sizes[1:] for part in ("speed", "deterministic")]
    return [
        {**common, "part": part, "size": size, "batch": SIZES[size].batch}
        for part, size in order
        if part in wanted.parts
    ]


def perform(job: Told, environ: dict[str, str], limit: float) -> Told:
    """Run ``job`` in a separate process; repeat it with half the batch if it does not fit."""
    told = run_part(job, environ, limit)
    while told.get("memory") and job["batch"] > 1:
        job = {**job, "batch": job["batch"] // 2}
        print(f"gpu: out of memory; again with a batch of {job['batch']}", file=sys.stderr)
        told = run_part(job, environ, limit)
    return told


def run_part(job: Told, environ: dict[str, str], limit: float) -> Told:
    """Run ``job`` once in a separate process; return its result, or why it has none."""
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "result.json"
        program = str(Path(__file__).resolve().parent / "gpulib")
        process = subprocess.Popen(
            [sys.executable, program, json.dumps(job), str(result)],
            env=environ, stdout=sys.stderr.fileno(),
        )  # fmt: skip
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {limit:.0f} s (see --limit and --no-compile)"}
        finally:
            process.kill()
            process.wait()
        if result.is_file():
            told: Told = json.loads(result.read_text(encoding="utf-8"))
            return told
    code = process.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"failed": f"its process ended with {how}"}


def speed_line(figures: Told) -> str:
    mfu = "unknown device" if figures["mfu"] is None else f"{figures['mfu']:.1%}"
    peak = figures["peak_gigabytes"]
    return (
        f"{figures['parameters'] / 1e9:.3f} B parameters, weights in {figures['weights']}, batch of "
        f"{figures['batch']} x {figures['context']}: step {1000 * figures['step_seconds']:.1f} ms, "
        f"{figures['tokens_per_second']:,.0f} tokens/s, MFU {mfu}"
        + ("" if peak is None else f", peak memory {peak:.1f} GB")
        + f"; first step {figures['first_step_seconds']:.1f} s"
    )


def checkpoint_line(figures: Told) -> str:
    notes = "".join(f"; {note}" for note in figures["notes"])
    restored = "with" if figures["restored"] else "NOT with"
    return (
        f"checkpoint of {figures['gigabytes']:.2f} GB: training stopped for "
        f"{figures['stalled_seconds']:.3f} s, committed after {figures['committed_seconds']:.2f} s and "
        f"{figures['steps_beside']} further steps, of {1000 * figures['step_seconds_without']:.1f} ms "
        f"without it; restored in {figures['restore_seconds']:.2f} s, {restored} the weights saved; copying "
        f"the weights alone takes {figures['copy_seconds']:.3f} s{notes}"
    )


LINES: dict[str, Callable[[Told], str]] = {
    "speed": speed_line,
    "deterministic": lambda figures: f"train.deterministic=true: {speed_line(figures)}",
    "checkpoint": checkpoint_line,
}


def report(wanted: argparse.Namespace, environ: dict[str, str]) -> int:
    """Run the parts, print each result, and return the exit code."""
    failures: list[str] = []
    measured = 0
    for job in jobs(wanted):
        name = f"{job['part']} {job['size']}"
        told = perform(job, environ, wanted.limit)
        if "refused" in told:
            print(f"gpu: {told['refused']}", file=sys.stderr)
            return 2
        figures = told.get("figures", {})
        if wanted.json:
            print(json.dumps({"part": name, **told}), flush=True)
        elif figures:
            if not measured:
                print(_machine(told["machine"]))
            print(LINES[job["part"]](figures), flush=True)
        measured += bool(figures)
        if reason := told.get("failed") or figures.get("wrong"):
            failures.append(f"{name}: {reason}")
            print(f"gpu: {failures[-1]}", file=sys.stderr)
    if failures:
        print(f"gpu: {len(failures)} failed: {'; '.join(failures)}", file=sys.stderr)
    return 0 if not failures else 1 if measured else 2


def _machine(machine: Told) -> str:
    memory = "" if machine["gigabytes"] is None else f", {machine['gigabytes']:.0f} GB"
    cuda = "" if machine["cuda"] is None else f", CUDA {machine['cuda']}"
    return f"{machine['device']}{memory}, torch {machine['torch']}{cuda}"


def among(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return a parser of names with commas between them."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"there is no {name!r}; choose of {', '.join(known)}"
                )
        return names

    return parse


def device(text: str) -> str:
    """Return the name of a device as torch writes it; this module does not import torch."""
    if re.fullmatch(r"cpu|cuda(:\d+)?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not cuda, cuda:1 … or cpu")
    return text


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        type=among(PARTS),
        default=list(PARTS),
        help=f"parts to run: {','.join(PARTS)} (default all)",
    )
    parser.add_argument(
        "--sizes", type=among(tuple(SIZES)), default=["1b", "7b"], help="models: 1b, 7b, tiny (default 1b,7b)"
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=20, help="timed steps per size (default 20)")
    parser.add_argument(
        "--device", type=device, default="cuda", help="cuda, cuda:1 …, or cpu (default cuda)"
    )
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    parser.add_argument(
        "--limit", type=float, default=300, help="time limit of a part in seconds (default 300)"
    )
    parser.add_argument(
        "--dir", type=Path, help="folder for the checkpoints (default: the temporary one)"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each part")
    return parser


def main() -> int:
    parser = arguments()
    wanted = parser.parse_args()
    if wanted.steps < 1:
        parser.error("--steps: at least one has to be timed")
    if wanted.dir is not None and not wanted.dir.is_dir():
        parser.error(f"--dir: there is no folder {wanted.dir}")
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"gpu: {sys.executable} has no {', '.join(missing)}; {REMEDY}", file=sys.stderr)
        return 2
    # A signal to this process also ends the running part.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return report(wanted, dict(os.environ))


if __name__ == "__main__":
    sys.exit(main())
