#!/usr/bin/env python3
"""`hpcrun aggregate` on synthetic runs, compared with parsing the same bytes with orjson.

    tools/bench/aggregate.py                 10,000 runs of 1,000 rows: 2.6 GB below --dir
    tools/bench/aggregate.py --runs 1000

Of every 10,000 runs, 50 have a torn last line and 20 a corrupt file. Names have letters of several scripts.
Seconds are wall time; the CPU time includes child processes and depends less on other programs.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import orjson

# This checkout's modules come before an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpcrun.config import Config, to_yaml

ROOT = Path(__file__).resolve().parents[2]
_SCRIPTS = ("run", "naïve-läuft", "эксперимент", "実験", "δοκιμή", "🚀-launch")
_CORRUPT = ("metrics.jsonl", "result.json", "config.yaml", "run.json", "events.jsonl")


def make(folder: Path, runs: int, rows: int) -> tuple[int, int]:
    """Write the runs and return the numbers of torn and corrupt runs."""
    torn, corrupt = max(1, runs // 200), max(1, runs // 500)
    # The files of a hundred runs, with different seeds and ends.
    bodies = [_metrics(random.Random(number), rows) for number in range(min(runs, 100))]
    for number in range(runs):
        run = folder / f"{_SCRIPTS[number % len(_SCRIPTS)]}-{number:05d}"
        run.mkdir(parents=True)
        config = _config(number % 10, 1 + number // 10 % 50, rows)
        (run / "config.yaml").write_text(config.replace("name: x", f"name: run-{number}"))
        (run / "run.json").write_text(json.dumps({"created": 1.79e9 + number, "executor": "slurm"}))
        (run / "events.jsonl").write_text(_events(number, rows))
        body = bodies[number % len(bodies)]
        (run / "metrics.jsonl").write_bytes(body[:-25] if number < torn else body)
        result = {"state": "finished", "steps": rows * 10, "time": 1.79e9 + number}
        (run / "result.json").write_text(json.dumps(result))
    for number in range(corrupt):
        run = next(folder.glob(f"*-{torn + number:05d}"))
        (run / _CORRUPT[number % len(_CORRUPT)]).write_bytes(random.Random(number).randbytes(5000))
    return torn, corrupt


@cache
def _config(seed: int, rate: int, rows: int) -> str:
    train = {"lr": 1e-4 * rate, "steps": rows * 10}
    return to_yaml(Config.model_validate({"name": "x", "seed": seed, "train": train}))


def _metrics(draw: random.Random, rows: int) -> bytes:
    lines = []
    for number in range(1, rows + 1):
        line = {
            "step": number * 10,
            "time": round(1.79e9 + number * 1.7, 3),
            "restart": 0,
            "loss": 4 / number**0.3 + draw.gauss(0, 0.1),
            "lr": 1e-3 * draw.random(),
            "tokens_per_second": round(15_000 * draw.random(), 1),
            "step_time": round(draw.random(), 6),
            "data_wait": round(draw.random() / 1000, 6),
            "memory_gb": 31.415,
            "gradient_norm": draw.random(),
            "loss_scale": 65536.0,
        }
        lines.append(json.dumps(line, separators=(",", ":")))
    return ("\n".join(lines) + "\n").encode()


def _events(number: int, rows: int) -> str:
    job = {"job": str(number), "restart": 0}
    events = [{"time": 1.79e9, "event": "submitted"}, {"time": 1.79e9, "event": "opened", **job}]
    events += [
        {"time": 1.79e9 + step, "event": "saved", **job, "step": step * rows} for step in range(10)
    ]
    events += [{"time": 1.79e9 + 11, "event": "ended", **job, "cause": "finished"}]
    return "".join(json.dumps(event) + "\n" for event in events)


def parse_only(folder: Path) -> None:
    """Parse all JSON of the runs with the faster of orjson's two ways, without storing it."""
    for run in sorted(folder.iterdir()):
        for name in ("run.json", "events.jsonl", "metrics.jsonl", "result.json"):
            data = (run / name).read_bytes()
            try:
                orjson.loads(b"[" + data.rstrip(b"\n").replace(b"\n", b",") + b"]")
            except orjson.JSONDecodeError:
                _parse_lines(data)


def _parse_lines(data: bytes) -> None:
    for line in data.split(b"\n"):
        try:
            orjson.loads(line)
        except orjson.JSONDecodeError:
            continue


def measured(command: list[str], printed: Path | None = None) -> tuple[float, float, float]:
    """Run ``command``; return wall seconds, CPU seconds and the maximum memory in GB.

    Args:
        printed: the file that gets the output; None: no program reads the output.
    """
    with (printed or Path(os.devnull)).open("wb") as output:
        begun, before = time.perf_counter(), os.times()
        process = subprocess.Popen(command, stdout=output)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _memory(process.pid))
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    after = os.times()
    used = sum(after[2:4]) - sum(before[2:4])
    return time.perf_counter() - begun, used, peak / 1e9


def _memory(pid: int) -> int:
    """Return the resident bytes of a process and its children."""
    total = 0
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
    return total + sum(_memory(int(child)) for child in children)


def change(folder: Path, share: float) -> int:
    """Append a line to some of the runs."""
    runs = sorted(folder.iterdir())
    chosen = runs[:: max(1, round(1 / share))]
    for run in chosen:
        with (run / "metrics.jsonl").open("ab") as stream:
            stream.write(b'{"step":99990,"time":1.8e9,"restart":0,"loss":1.5}\n')
    return len(chosen)


def main() -> None:
    """Make the runs, and measure the command on them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--processes", type=int, help="processes of `hpcrun aggregate`")
    parser.add_argument("--dir", type=Path, help="temporary folder for the runs (default: $TMPDIR)")
    parser.add_argument("--parse-only", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parse_only is not None:
        parse_only(options.parse_only)
        return
    scratch = Path(tempfile.mkdtemp(prefix="hpcrun-aggregate-", dir=options.dir))
    try:
        _measure(scratch, options)
    finally:
        shutil.rmtree(scratch)


def _measure(scratch: Path, options: argparse.Namespace) -> None:
    folder, output = scratch / "runs", scratch / "results.h5"
    torn, corrupt = make(folder, options.runs, options.rows)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(
        f"{options.runs:,} runs of {options.rows:,} rows, {size / 1e9:.2f} GB, "
        f"{torn} torn, {corrupt} corrupt",
        flush=True,
    )
    program = [sys.executable, str(ROOT / "tools" / "aggregate.py"), str(folder), "-o", str(output)]
    if options.processes is not None:
        program += ["--processes", str(options.processes)]
    parsing = [sys.executable, __file__, "--parse-only", str(folder)]
    base = _shown("parsing only", measured(parsing))
    printed = scratch / "summary"
    cold = _shown("cold", measured(program, printed), base, "parsing only")
    _require_named(printed, torn + corrupt)
    _shown("warm", measured(program))
    changed = change(folder, 0.01)
    _shown(f"{changed} changed", measured(program), cold, "cold")
    print(f"results.h5: {output.stat().st_size / 1e9:.2f} GB", flush=True)


def _require_named(printed: Path, bad: int) -> None:
    """Check that the summary names the torn and the corrupt runs, which come first, and no others."""
    found = {int(number) for number in re.findall(r"-(\d{5})/\w+\.\w+: ", printed.read_text())}
    if found != set(range(bad)):
        raise SystemExit(f"the summary names the runs {sorted(found)}, not the first {bad}")
    print(f"the summary names all {bad} torn and corrupt files", flush=True)


def _shown(
    name: str, cost: tuple[float, float, float], other: float | None = None, what: str = ""
) -> float:
    wall, used, memory = cost
    ratio = f"  {wall / other:6.3f} x {what}" if other is not None else ""
    print(f"{name:>14}: {wall:8.2f} s, CPU {used:8.2f} s, {memory:5.2f} GB{ratio}", flush=True)
    return wall


if __name__ == "__main__":
    main()
