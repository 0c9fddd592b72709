#!/usr/bin/env python3
"""Check hpcrun on a machine with GPUs: about ten minutes, on all its GPUs.

Run it first on a new machine. Each check runs in a separate process with a time limit, so a crash or a
hang does not end the other checks. Needs the Python environment in which hpcrun is installed.

environment  GPUs, driver, torch, CUDA or HIP, cuDNN, NCCL; the environment that a checkpoint records
precision    a step in fp32, tf32, bf16 and fp16, with 1 and 2 micro-batches; a planted inf is skipped
collectives  hashes of all-reduce and reduce-scatter in two fresh sets of processes (two GPUs)
staging      page-locked memory, and the time of a snapshot compared with a plain copy
fsdp         a sharded step, its checkpoint, and the same step after a restore
deferred     fsdp.deferred_init gives the bits of a normal build (two GPUs)
estimate     the peak of device memory in a step, and the figure of hpcrun estimate
failure      the peers of a rank that raises an exception end within seconds (two GPUs)
resume       a run with two interruptions ends with the bits of the undisturbed run
compile      compiled steps, with accumulation and with CUDA graphs
bench        throughput and MFU of a run of configs/llama-1b.yaml, with both kinds of kernels

Results: pass, warn, fail, unknown, not run. The JSON file has all figures; mail it or add it to an issue.
Exit code 1: a check failed; 2: bad input, or no GPU.

    tools/gpu_acceptance.py                              # all GPUs of this machine
    tools/gpu_acceptance.py --only collectives,failure   # some checks
    tools/gpu_acceptance.py --simulate                   # the same path on CPUs, with gloo
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from acceptancelib import page
from acceptancelib.outcome import CHECKS, REPORT, SLOWER, Job, Outcome

_PROGRAM = Path(__file__).resolve().parent / "acceptancelib"
_NEEDED = ("torch", "numpy", "pydantic", "yaml", "xxhash", "submitit")
_COUNT = (
    "import torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(n, *sorted({torch.cuda.get_device_name(i) for i in range(n)}), sep='\\n')"
)
_OUTPUT = 8000
"""Characters of the output of a failed check in the JSON file."""

_GRACE = 15.0
"""Seconds that a check has after its time limit to end its runs and ranks."""


def run_check(
    job: Job, environ: dict[str, str], *, cut: bool, program: Path = _PROGRAM
) -> list[Outcome]:
    """Run a check in a separate process; ``cut``: its limit is the remaining time of this program.

    ``program``: the folder of the check's program.

    Its output goes to a file, and the end of the output into the details of a failure.
    """
    log = Path(job.folder) / "check.log"
    outcomes = _outcomes(job, [sys.executable, str(program)], environ, log, cut=cut)
    said = log.read_text(encoding="utf-8", errors="replace")[-_OUTPUT:]
    return [
        replace(it, details={**it.details, "output": said})
        if it.result in ("fail", "unknown")
        else it
        for it in outcomes
    ]


def _outcomes(
    job: Job, command: list[str], environ: dict[str, str], log: Path, *, cut: bool
) -> list[Outcome]:
    result = Path(job.folder) / "outcomes.json"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, json.dumps(asdict(job)), str(result)],
            env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        process.wait(job.seconds)
    except subprocess.TimeoutExpired:
        line = f"not done after {job.seconds:.0f} s"
        if cut:
            return [Outcome(job.check, "unknown", line, f"--only {job.check}, or more --minutes")]
        return [Outcome(job.check, "fail", line, REPORT)]
    finally:
        _end(process)
    if result.is_file():
        return [Outcome(**told) for told in json.loads(result.read_text(encoding="utf-8"))]
    code = process.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return [Outcome(job.check, "fail", f"its process ended with {how}", REPORT)]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the check and its processes."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(wanted: argparse.Namespace, gpus: int, machine: str, environ: dict[str, str]) -> int:
    """Run the checks, print the page, write the JSON file, and return the exit code."""
    began = time.monotonic()
    found: list[tuple[str, Outcome]] = []
    seconds: dict[str, float] = {}
    print(page.heading(machine), flush=True)
    for name in (name for name in CHECKS if name in wanted.only):
        limit = CHECKS[name].seconds * (SLOWER if wanted.simulate else 1)
        left = 60 * wanted.minutes - (time.monotonic() - began)
        started = time.monotonic()
        print(f"gpu_acceptance: {name}: {CHECKS[name].purpose}", file=sys.stderr, flush=True)
        if left < 1:
            line = f"the {wanted.minutes:g} minutes are over"
            outcomes = [Outcome(name, "not run", line, f"--only {name}, or more --minutes")]
        else:
            with tempfile.TemporaryDirectory(
                prefix="acceptance-", ignore_cleanup_errors=True
            ) as place:
                job = Job(name, gpus, place, min(limit, left))
                outcomes = run_check(job, environ, cut=left < limit)
        seconds[name] = round(time.monotonic() - started, 1)
        for outcome in outcomes:
            found.append((name, outcome))
            print(page.lines(name, outcome), flush=True)
        _write(wanted, page.document(machine, seconds, found, gpus=gpus, simulated=wanted.simulate))
    minutes = (time.monotonic() - began) / 60
    print(f"\n{page.summary([outcome for _, outcome in found])}, in {minutes:.1f} minutes")
    print(f"{wanted.json} has all figures: mail it, or add it to an issue", flush=True)
    return 1 if any(outcome.result == "fail" for _, outcome in found) else 0


def _write(wanted: argparse.Namespace, content: dict[str, object]) -> None:
    wanted.json.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def visible(environ: dict[str, str]) -> tuple[int, str]:
    """Return the number of GPUs that torch sees, and their names; a broken driver counts as no GPU."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT],
            env=environ, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 0, "torch did not answer in 180 s"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return 0, (done.stderr.strip().splitlines() or ["torch cannot be imported"])[-1]
    return int(lines[0]), f"{lines[0]} x {', '.join(lines[1:])}"


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in CHECKS:
            raise argparse.ArgumentTypeError(f"there is no {name!r}; choose of {', '.join(CHECKS)}")
    return names


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of minutes")
    return value


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: name a file in a folder of yours"
        )
    return path


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--simulate", action="store_true", help="use CPUs and gloo; checks of GPUs are not run"
    )
    parser.add_argument(
        "--only", type=_names, default=list(CHECKS), help="checks to run, with commas between them"
    )
    parser.add_argument(
        "--json", type=_file, default="gpu-acceptance.json", metavar="FILE",
        help="file for all figures (default gpu-acceptance.json)",
    )  # fmt: skip
    parser.add_argument("--minutes", type=_positive, help="time limit (default 10; --simulate: 60)")
    return parser


def main() -> int:
    """Check the input, then run the checks."""
    wanted = arguments().parse_args()
    wanted.minutes = wanted.minutes or (60.0 if wanted.simulate else 10.0)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        print(
            f"gpu_acceptance: {sys.executable} has no {', '.join(missing)}; run this with the Python of "
            "hpcrun's environment",
            file=sys.stderr,
        )
        return 2
    environ = dict(os.environ)
    if wanted.simulate:
        # Without GPUs also on a machine with GPUs.
        environ |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        # Threads of several ranks on few cores wait for each other.
        environ.setdefault("OMP_NUM_THREADS", "1")
        gpus, machine = 0, "simulated on CPUs with gloo"
    else:
        gpus, machine = visible(environ)
        if not gpus:
            why = "" if machine.startswith("0 x") else f" ({machine})"
            print(
                f"gpu_acceptance: torch sees no GPU here{why}; run this on a node with GPUs, or try the path "
                "with --simulate",
                file=sys.stderr,
            )
            return 2
    # A signal to this process also ends the running check.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return report(wanted, gpus, machine, environ)
    except KeyboardInterrupt:
        print("gpu_acceptance: interrupted; the checks until now are in the file", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
