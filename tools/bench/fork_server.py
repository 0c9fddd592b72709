#!/usr/bin/env python3
"""Time from the start of a rank's process to the first line of its training: fresh, and forked.

    python tools/bench/fork_server.py [ROUNDS]

Both kinds of start take turns, so that a busy machine slows both equally, and the medians are compared. The
line is that of an attempt which begins to train: config, imports, process group, model and data are
ready. The files stay in the page cache: on a cluster a fresh start takes longer. The memory of the idle
server is that of all its pages (RSS), and of those that no file backs.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from hpcrun.config import override_layer, resolve, to_yaml  # noqa: E402
from hpcrun.ranks.fork_messages import (  # noqa: E402
    FORK_SERVER,
    connect,
    fork_server_command,
    own_address,
)
from hpcrun.run.directory import create  # noqa: E402

RANK = ("-u", "-m", "hpcrun.worker")
NAME = f"bench-{os.getpid()}"
BEGUN = "starting at step 0"
TASK = {
    "HPCRUN_LOCAL_CLUSTER": "1", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "local0",
    "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip


def start(folder: Path, name: str, server: str) -> float:
    """Return the seconds until a new run begins to train; raises SystemExit with its output otherwise."""
    words = [
        "task=hpcrun.tasks.language_model:LanguageModel", "job.cpu=true", "train.steps=1",
        "train.batch_size=1", "model.width=32", "model.layers=1", "model.context=16",
        "train.validate_batches=1",
    ]  # fmt: skip
    run = create(folder / name, to_yaml(resolve([override_layer(words)])), {"folder": str(ROOT)})
    environ = {**os.environ, **TASK, "PYTHONPATH": str(ROOT), FORK_SERVER: server}
    begun, lines = time.perf_counter(), []
    with subprocess.Popen(
        [sys.executable, *RANK, str(run.path)],
        env=environ, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as rank:  # fmt: skip
        assert rank.stdout
        for line in rank.stdout:
            lines.append(line)
            if BEGUN in line:
                seconds = time.perf_counter() - begun
                rank.kill()
                return seconds
    raise SystemExit("".join(lines))


def main(rounds: int) -> None:
    """Print the medians of ``rounds`` starts of each kind, their ratio, and the memory of the server."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
    command = fork_server_command(NAME, parent=os.getpid(), threads=threads, rank=RANK)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), FORK_SERVER: NAME}
    found: dict[str, list[float]] = {"fresh": [], "forked": []}
    with (
        tempfile.TemporaryDirectory() as place,
        subprocess.Popen(command, env=environ, cwd=ROOT) as server,
    ):
        while True:
            try:
                connect(own_address(NAME), 1.0).close()
                break
            except OSError:
                time.sleep(0.1)
        for number in range(rounds + 1):
            for kind, name in (("fresh", ""), ("forked", NAME)):
                seconds = start(Path(place), f"{kind}-{number}", name)
                # The first start of each kind fills the caches.
                if number:
                    found[kind].append(seconds)
        status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
        memory = {line.split(":")[0]: int(line.split()[1]) for line in status if "kB" in line}
        server.kill()
    fresh, forked = (statistics.median(seconds) for seconds in found.values())
    print(f"fresh {fresh:.2f} s, forked {forked:.2f} s ({forked / fresh:.2f}) of {rounds} rounds")
    print(
        f"idle server: {memory['VmRSS'] / 1024:.0f} MiB, {memory['RssAnon'] / 1024:.0f} MiB without files"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
