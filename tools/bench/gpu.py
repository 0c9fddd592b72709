#!/usr/bin/env python3
"""Measure one GPU with hpcrun's trainer: throughput, MFU, memory, checkpoint cost, and parity.

Needs a Python with torch and this checkout. Missing libraries of the trainer
(numpy, orjson, pydantic, PyYAML, tqdm, xxhash) are installed once into a folder below ~/.cache; the
environment does not change. Each part runs in a separate process: a failed part does not affect the others:

parity       fp16 loss scaling compared with torch's own loop, bit by bit
world        DDP and FSDP with one NCCL rank, compared with a single process
repeat       two equal trainings, compared bit by bit
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
from libraries import TRAINING, Unavailable, provide

PARTS = ("parity", "world", "repeat", "speed", "deterministic", "checkpoint")
SIZED = ("speed", "deterministic", "checkpoint")
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
    while told.get("memory") and job["part"] in SIZED and job["batch"] > 1:
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


def parity_line(figures: Told) -> str:
    if not figures["torch_repeats"]:
        found = "unknown: torch's own loop is not deterministic here"
    elif figures["equal"]:
        found = "yes"
    else:
        found = f"NO, from step {figures['first_difference']} on"
    return (
        f"fp16 loss scaling equals torch's own loop, bit by bit, {figures['overflows']} overflows among 50 "
        f"steps: {found}"
    )


def world_line(figures: Told) -> str:
    distances = ", ".join(f"{name} {value:.1e}" for name, value in figures["furthest"].items())
    found = "NO" if "wrong" in figures else "yes"
    return f"a {figures['backend']} world of one rank trains like a single process: {found} ({distances})"


def repeat_line(figures: Told) -> str:
    equal, seconds = figures["equal"], figures["step_seconds"]
    strict = "yes" if equal["true"] else "NO"
    others = (f"{'yes' if equal[value] else 'no'} with {value}" for value in ("warn", "false"))
    cost = (f"{seconds[value] / seconds['false']:.2f} x ({value})" for value in ("true", "warn"))
    return (
        f"two equal trainings end with the same bits: {strict} with train.deterministic=true, "
        f"{', '.join(others)}; a small model's step takes {' and '.join(cost)} of what it does with false"
    )


LINES: dict[str, Callable[[Told], str]] = {
    "speed": speed_line,
    "deterministic": lambda figures: f"train.deterministic=true: {speed_line(figures)}",
    "checkpoint": checkpoint_line,
    "parity": parity_line,
    "world": world_line,
    "repeat": repeat_line,
}


def report(wanted: argparse.Namespace, environ: dict[str, str]) -> int:
    """Run the parts, print each result, and return the exit code."""
    failures: list[str] = []
    measured = 0
    for job in jobs(wanted):
        name = f"{job['part']} {job['size']}" if job["part"] in SIZED else job["part"]
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
    if find_spec("torch") is None:
        print(
            f"gpu: {sys.executable} has no torch; run this with a Python that has", file=sys.stderr
        )
        return 2
    environ = dict(os.environ)
    try:
        folder = provide(TRAINING)
    except Unavailable as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    if folder is not None:
        # Before the environment's libraries: these versions were installed together and fit together.
        paths = [str(folder), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # A signal to this process also ends the running part.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return report(wanted, environ)


if __name__ == "__main__":
    sys.exit(main())
