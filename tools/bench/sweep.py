#!/usr/bin/env python3
"""Cost of the submission of a large sweep beyond sbatch: both times, CPU time and the difference.

    tools/bench/sweep.py [ELEMENTS [ROUNDS]]        (as root; see docs/devcluster.md)

`hpcrun submit --sweep` and a plain sbatch of the same array take turns, so that a busy machine slows both
alike. The jobs wait for an hour, so that no task starts while the benchmark runs.
"""

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.on_slurm import cluster
from tests.on_slurm.scripts import Bench

Cost = tuple[float, float]


def timed(bench: Bench, command: list[str]) -> Cost:
    """Return the wall and CPU seconds of ``command``, run as the job user on the login host."""
    before, begun = os.times(), time.perf_counter()
    bench.slurm.run(command, cwd=bench.folder, env=bench.environment())
    wall, after = time.perf_counter() - begun, os.times()
    cpu = (
        after.children_user - before.children_user + after.children_system - before.children_system
    )
    return wall, cpu


def submission(bench: Bench, elements: int, number: int) -> tuple[Cost, Cost]:
    """Return the cost of a sweep, and of an sbatch of the script that the sweep has sent."""
    name = f"sweep-{number}"
    shape = ["--nodes", "1", "--gpus", "1", "--cpu", "--executor", "slurm", "--no-snapshot"]
    options = [f"--sweep=seed=0:{elements}", "job.sbatch_args=[--begin=now+1hour]"]
    command = [bench.slurm.python, "-m", "hpcrun", "submit", "--name", name, *shape, *options]
    whole = timed(bench, [*command, "--", "true", "{seed}"])
    script = bench.folder / "runs" / name / "logs" / "batch.sbatch"
    plain = timed(bench, ["sbatch", str(script)])
    bench.slurm.admin("scancel", f"--user={bench.slurm.user}")
    return whole, plain


def main(elements: int, rounds: int) -> None:
    """Measure ``rounds`` submissions of ``elements`` after one that fills the caches."""
    name = f"bench-{os.getpid()}"
    try:
        bench = Bench(cluster.start(name))
        costs = [submission(bench, elements, number) for number in range(rounds + 1)][1:]
    finally:
        cluster.stop(name)
    for kind, unit in enumerate(("wall", "CPU")):
        whole = statistics.median(sweep[kind] for sweep, _ in costs)
        plain = statistics.median(sbatch[kind] for _, sbatch in costs)
        print(
            f"{elements} elements, {unit}: sweep {whole:.2f} s, sbatch {plain:.2f} s, "
            f"difference {whole - plain:.2f} s"
        )


if __name__ == "__main__":
    main(*(int(number) for number in [*sys.argv[1:], *["1000", "5"][len(sys.argv) - 1 :]]))
