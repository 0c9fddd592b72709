#!/usr/bin/env python3
"""Time from the start of a rank's process to the end of its first step: cold, warm, and after a requeue.

Whole runs of hpcrun's loop train a small GPT with train.compile on the CPU. A new folder for torch's compile
cache simulates a node that has never seen the model.

    cold            a new run on a new node
    requeue         the same run, preempted after its second step, continues on another new node
    warm            another new run on the node of "cold"
    without cache   the same requeue with train.compile_cache=false

The columns: "import" until hpcrun and torch are imported, "rendezvous" until the process group exists,
"build" model, data and trainer, "restore" the checkpoint, "compile" the first step without the time of
the second, "rest" everything else until the end of the first step, among it the time of a usual step.
"compiled" and "found" count the graphs that torch has compiled, and those found in its cache. The files
stay in the page cache between starts: on a cluster, import and restore take longer than here.

    tools/bench/first_step.py                                # three to ten minutes on two cores
    tools/bench/first_step.py --ranks 2 --no-compile
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

BEGUN = "HPCRUN_BENCH_BEGUN"
PARTS = ("import", "rendezvous", "build", "restore", "compile", "rest")
GRAPHS = {"compiled": "miss", "found": "hit"}
"""Names of torch's counters for graphs."""
MARK = "hpcrun-bench-first-step "
STOPPED = (75, 143)


def graphs() -> dict[str, float]:
    """Return how many graphs torch has compiled in this process, and how many it has found in its cache."""
    if "torch._dynamo.utils" not in sys.modules:
        return dict.fromkeys(GRAPHS, 0.0)
    counters = sys.modules["torch._dynamo.utils"].counters["inductor"]
    return {name: counters[f"fxgraph_cache_{kind}"] for name, kind in GRAPHS.items()}


class Clock:
    """Seconds by part of the start."""

    def __init__(self) -> None:
        self.begun = float(os.environ[BEGUN])
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.spent["import"] = time.time() - self.begun

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, with its time added to ``part``."""

        def call(*arguments: Any, **options: Any) -> Any:
            before = time.time()
            try:
                return function(*arguments, **options)
            finally:
                self.spent[part] += time.time() - before

        return call

    def stepping(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``take``; after the second step print the times, and ask for a preemption."""
        ends: list[tuple[float, float]] = []

        def step(*arguments: Any) -> Any:
            before = time.time()
            result = take(*arguments)
            float(result.loss)
            ends.append((before, time.time()))
            if len(ends) == 2:
                (first, end), (second, last) = ends
                total, usual = end - self.begun, last - second
                self.spent["compile"] = max(0.0, end - first - usual)
                self.spent["rest"] = total - sum(self.spent.values())
                print(MARK + json.dumps(self.spent | graphs()), flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        return step


def be_a_rank(path: Path) -> None:
    """Run a rank of hpcrun with a clock around the parts of its start."""
    from hpcrun import worker
    from hpcrun.train import session, setup

    clock = Clock()
    session.process_group.join_run = clock.timed("rendezvous", session.process_group.join_run)
    session.open_task = clock.timed("build", session.open_task)
    session.build_batches = clock.timed("build", session.build_batches)
    setup.build_trainer = clock.timed("build", setup.build_trainer)
    setup.restore = clock.timed("restore", setup.restore)
    micro_batches = session.MicroBatchStep
    session.MicroBatchStep = lambda *given: clock.stepping(micro_batches(*given))  # type: ignore
    sys.argv = [sys.argv[0], str(path)]
    worker.main()


def new_run(folder: Path, name: str, wanted: argparse.Namespace, *more: str) -> Path:
    """Make a run directory that trains the GPT of the options."""
    from hpcrun.config import override_layer, resolve, to_yaml
    from hpcrun.run.directory import create

    overrides = [
        "task=hpcrun.tasks.language_model:LanguageModel", "job.cpu=true",
        f"job.gpus={wanted.ranks}", "train.steps=1000", f"train.batch_size={4 * wanted.ranks}",
        "checkpoint.every=0", "data.validation_fraction=0.01", "train.timeout=600",
        f"train.compile={str(wanted.compile).lower()}", f"model.width={wanted.width}",
        f"model.layers={wanted.layers}", f"model.context={wanted.context}", *more,
    ]  # fmt: skip
    config = to_yaml(resolve([override_layer(overrides)]))
    return create(folder / name, config, {"folder": str(folder)}).path


def start(run: Path, node: Path, ranks: int) -> dict[str, float]:
    """Start the ranks of ``run`` on ``node``; return rank 0's times when all have ended.

    Raises:
        SystemExit: a rank failed; the message has its output.
    """
    node.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    inherited = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    started = []
    for rank in range(ranks):
        environ = inherited | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo",
            "TMPDIR": str(node), BEGUN: str(time.time()),
        }  # fmt: skip
        started.append(
            subprocess.Popen(
                [sys.executable, __file__, "--rank-of", str(run)],
                env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    said = [process.communicate()[0] for process in started]
    times = [line for line in said[0].splitlines() if line.startswith(MARK)]
    if not times or any(process.returncode not in STOPPED for process in started):
        codes = [process.returncode for process in started]
        raise SystemExit(f"first_step: exit codes {codes}:\n{said[0][-3000:]}")
    found: dict[str, float] = json.loads(times[0].removeprefix(MARK))
    return found


def row(kind: str, figures: dict[str, float]) -> str:
    """Return a row of the table."""
    parts = [figures[part] for part in PARTS]
    cells = [f"{seconds:.1f} s" for seconds in (*parts, sum(parts))]
    cells += [f"{figures[name]:.0f}" for name in GRAPHS]
    return f"| {kind} | {' | '.join(cells)} |"


def measure(wanted: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return the times of each kind of start, one entry per round."""
    found: dict[str, list[dict[str, float]]] = {}

    def note(kind: str, run: Path, node: Path) -> None:
        found.setdefault(kind, []).append(start(run, node, wanted.ranks))
        print(row(kind, found[kind][-1]), file=sys.stderr, flush=True)

    for number in range(wanted.rounds):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            run = new_run(folder, f"run-{number}", wanted)
            note("cold", run, folder / "node-1")
            note("requeue", run, folder / "node-2")
            note("warm", new_run(folder, f"warm-{number}", wanted), folder / "node-1")
            if wanted.compile:
                off = "train.compile_cache=false"
                run = new_run(folder, f"without-{number}", wanted, off)
                start(run, folder / "node-1", wanted.ranks)
                note("without cache", run, folder / "node-3")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="rounds (default 1)")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks (default 1)")
    parser.add_argument("--width", type=int, default=256, help="width of the GPT (default 256)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the GPT (default 4)")
    parser.add_argument("--context", type=int, default=128, help="bytes per sample (default 128)")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="train without torch.compile"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.rank_of is not None:
        be_a_rank(wanted.rank_of)
    found = measure(wanted)
    medians = {
        kind: {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
        for kind, rounds in found.items()
    }
    if wanted.json:
        print(json.dumps(medians, indent=2))
        return 0
    print(f"| start | {' | '.join((*PARTS, 'total', *GRAPHS))} |")
    print(f"|---|{'---:|' * (len(PARTS) + 1 + len(GRAPHS))}")
    for kind, figures in medians.items():
        print(row(kind, figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
