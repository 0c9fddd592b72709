#!/usr/bin/env python3
"""Inject faults into a run on a real Slurm until the run ends, and compare it with the undisturbed run.

Starts a dev cluster, trains a small model on two of its nodes, and injects random faults:
preemption by another job, a killed rank, power loss of a node, a cut link, scancel and resume, a
stopped controller, a time limit. Then compares every byte of weights, optimizer and random
generators, and the samples of every rank, and checks the event log.

    tools/chaos.py --faults 10 --seed 1       (as root; see docs/devcluster.md)
"""

import argparse
import os
import random
import signal
import sys
from pathlib import Path

# This checkout's modules come before an installed package.
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from chaoslib.compare import verify  # noqa: E402
from chaoslib.disturbed import ANY_STEP, NODES, PATIENCE, Chaos  # noqa: E402
from chaoslib.faults import disturb, plan, table  # noqa: E402

from tests.on_slurm import cluster  # noqa: E402
from tests.on_slurm.cluster import SlurmCluster  # noqa: E402


def run(
    slurm: SlurmCluster,
    faults: int,
    ranks: int,
    seed: int,
    during: bool = False,
    only: str | None = None,
) -> None:
    """Train undisturbed, train with faults, compare, and print; raises AssertionError on a difference."""
    dice = random.Random(seed)
    planned = plan(faults, dice, during, only)
    chaos = Chaos(slurm, faults, ranks, dice)
    reference = chaos.submit("undisturbed", "at-once", save_every=0)
    chaos.wait_for_account(reference, PATIENCE + chaos.steps)
    print(f"undisturbed: {chaos.steps} steps on {NODES} x {ranks} ranks", flush=True)
    chaos.submit("disturbed", "pace", save_every=5)
    met = disturb(chaos, planned)
    chaos.allow(ANY_STEP)
    chaos.wait_for_account(chaos.run, PATIENCE)
    figures = verify(chaos, reference)
    print(table(met))
    for key, value in figures.items():
        print(f"  {key:<18} {value}")
    print(f"seed {seed}: {faults} faults, weights and samples are identical")


def main() -> int:
    """Run everything; return 0 if the disturbed run equals the undisturbed run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--faults", type=int, default=10, metavar="N", help="number of faults (default 10)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of the order of faults"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="R", help="ranks per node (default 2)"
    )
    parser.add_argument(
        "--during-restarts",
        action="store_true",
        help="kill a rank, and inject each fault at a random moment of the restart that follows",
    )
    parser.add_argument("--only", metavar="KIND", help="inject only faults of this kind")
    parser.add_argument("--keep", action="store_true", help="keep the cluster running")
    wanted = parser.parse_args()
    why_not = cluster.why_not()
    if why_not is not None:
        print(f"chaos: {why_not}", file=sys.stderr)
        return 2
    # SIGTERM also removes the cluster.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name = f"chaos-{os.getpid()}"
    slurm = cluster.start(name, nodes=4, grace_s=5)
    try:
        run(slurm, wanted.faults, wanted.ranks, wanted.seed, wanted.during_restarts, wanted.only)
    except AssertionError as failure:
        print(f"chaos: seed {wanted.seed}: {failure}", file=sys.stderr)
        return 1
    finally:
        if not wanted.keep:
            cluster.stop(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
