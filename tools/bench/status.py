"""The time of ``hpcrun status`` over many runs, the bytes that it reads of each file, and its Slurm calls.

    python tools/bench/status.py [RUNS]

Makes RUNS (10,000) run directories in a temporary folder: a third finished, a third waiting and a third
running on Slurm, with an event log of 2 MB and metrics of 5 MB in one of a thousand. squeue, sacct and
scontrol are small programs that answer immediately and count their calls. Prints the wall and CPU time of
five commands with their calls of these programs, and the most bytes that were read of one file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SCRIPT = """#!/bin/sh
echo {name} >> {calls}
{answer}
"""
# Of the long event logs: more than the command reads of one.
_SAVES, _LINES = 20_000, 30_000
_COUNTING = """
import io, json, os, pathlib, sys
sys.path.insert(0, {root!r})
most = {{}}
class Counting(io.FileIO):
    def read(self, size=-1):
        data = super().read(size)
        most[self.name] = most.get(self.name, 0) + len(data)
        return data
    def readall(self):
        data = super().readall()
        most[self.name] = most.get(self.name, 0) + len(data)
        return data
    def readinto(self, buffer):
        count = super().readinto(buffer)
        most[self.name] = most.get(self.name, 0) + count
        return count
plain = pathlib.Path.open
def opened(self, mode="r", buffering=-1, encoding=None, errors=None, newline=None):
    raw = io.BufferedReader(Counting(str(self)))
    return raw if "b" in mode else io.TextIOWrapper(raw, encoding=encoding, errors=errors)
pathlib.Path.open = opened
from hpcrun.cli.main import guarded
guarded(["status", "--runs-dir", {runs!r}])
pathlib.Path.open = plain
largest = max(most, key=most.get)
by_name = {{}}
for name, count in most.items():
    by_name[os.path.basename(name)] = max(count, by_name.get(os.path.basename(name), 0))
print(json.dumps(by_name), file=sys.stderr)
"""


def make_run(folder: Path, number: int, now: float) -> None:
    """Make one run directory as hpcrun leaves it, without a job behind it."""
    job, kind = str(100_000 + number), number % 3
    run = folder / f"run-{number:05d}"
    (run / "checkpoints").mkdir(parents=True)
    (run / "logs").mkdir()
    (run / "config.yaml").write_text("command: []\njob:\n  nodes: 1\ntrain:\n  steps: 100000\n")
    (run / "run.json").write_text("{}")
    base = {"job": job, "restart": 0}
    events = [{"time": now - 9000, "event": "submitted", "executor": "slurm", "name": "x", **base}]
    if kind != 1:
        events += [
            {"time": now - 8000, "event": "opened", "executor": "slurm", **base},
            {"time": now - 7990, "event": "started", "step": 0, **base},
        ]
        saves = _SAVES if number % 1000 == 0 else 10
        events += [
            {"time": now - 7000 + step / 10, "event": "saved", "step": step, "seconds": 0.1, **base}
            for step in range(saves)
        ]
        lines = _LINES if number % 1000 == 0 else 50
        metrics = [
            {"step": step, "time": now - 6000 + step / 10, "restart": 0, "loss": 2.5, "lr": 1e-4,
             "tokens_per_second": 12345.6, "step_time": 0.1, "data_wait": 0.001, "memory_gb": 3.2}
            for step in range(lines)
        ]  # fmt: skip
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    if kind == 0:
        events += [
            {
                "time": now - 10,
                "event": "ended",
                "cause": "finished",
                "restart_allowed": False,
                **base,
            }
        ]
        (run / "result.json").write_text('{"state": "finished"}')
        os.utime(run / "result.json", (now - 3600, now - 3600))
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def stub(folder: Path, calls: Path, runs: int) -> dict[str, str]:
    """Make small programs named as Slurm's; return the environment that finds them first."""
    folder.mkdir()
    jobs = "\n".join(
        f"{100_000 + number}|{'PENDING' if number % 3 == 1 else 'RUNNING'}||N/A,N/A|1:00|Priority|x"
        for number in range(runs)
        if number % 3
    )
    (folder / "answer").write_text(f"{jobs}\n")
    for name, answer in (("squeue", f"cat {folder}/answer"), ("sacct", ""), ("scontrol", "")):
        (folder / name).write_text(_SCRIPT.format(name=name, calls=calls, answer=answer))
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def timed(environ: dict[str, str], *words: str) -> tuple[float, float, int]:
    """Return the wall and CPU seconds of ``hpcrun status WORDS``, and the number of lines that it printed."""
    before, begun = os.times(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hpcrun", "status", *words],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    wall, after = time.perf_counter() - begun, os.times()
    cpu = after.children_user - before.children_user
    cpu += after.children_system - before.children_system
    return wall, cpu, len(done.stdout.splitlines())


def main(count: int) -> None:
    """Make the runs, measure, and print."""
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as place:
        folder, calls = Path(place), Path(place) / "calls"
        now = time.time()
        for number in range(count):
            make_run(folder / "runs", number, now)
        environ = stub(folder / "bin", calls, count) | {"PYTHONPATH": str(root)}
        where = ("--runs-dir", str(folder / "runs"))
        for words in ((), (), ("--json",), ("--state", "failed"), ("--name", "run-0001*")):
            calls.write_text("")
            wall, cpu, lines = timed(environ, *where, *words)
            asked = calls.read_text().split()
            told = " ".join(words) or "(table)"
            print(f"{told:18} wall {wall:6.2f} s, CPU {cpu:6.2f} s, {lines} lines", end="")
            print(f", Slurm calls: {' '.join(asked)}", flush=True)
        code = _COUNTING.format(root=str(root), runs=str(folder / "runs"))
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        )
        for name, read in sorted(json.loads(done.stderr.splitlines()[-1]).items()):
            sizes = [path.stat().st_size for path in (folder / "runs").glob(f"*/{name}")]
            # The program reads files elsewhere too, such as a profile of the site.
            if not sizes:
                continue
            print(
                f"{name:18} at most {read:8,} bytes read of one file; the largest has {max(sizes):,}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=10_000)
    main(parser.parse_args().runs)
