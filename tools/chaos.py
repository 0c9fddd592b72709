#!/usr/bin/env python3
"""Inject faults into a run on a real Slurm until the run ends, and compare it with the undisturbed run.

Starts a dev cluster, trains a small model on two of its nodes, and injects random faults:
preemption by another job, a killed rank, power loss of a node, a cut link, scancel and resume, a
stopped controller, a time limit. Then compares every byte of weights, optimizer and random
generators, and the samples of every rank, and checks the event log and that no attempt writes after
a newer one has begun.

    tools/chaos.py --faults 10 --seed 1       (as root; see docs/devcluster.md)
    tools/chaos.py --faults 20 --compare      the same faults also with restarts.in_place=false
    tools/chaos.py --faults 30 --during-restarts

With --during-restarts each fault kills a rank, and at a random moment of the restart that follows another
rank, srun, the shell or the program of the batch step, a slurmstepd, slurmd or slurmctld, or cancels the run.
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
from chaoslib.disturbed import ANY_STEP, NODES, PATIENCE, STEPS_PER_FAULT, Chaos  # noqa: E402
from chaoslib.faults import disturb, plan, table  # noqa: E402

from hpcrun.run.directory import RunDirectory  # noqa: E402
from tests.on_slurm import cluster  # noqa: E402
from tests.on_slurm.cluster import SlurmCluster  # noqa: E402


def run(slurm: SlurmCluster, wanted: argparse.Namespace) -> None:
    """Train undisturbed, train with faults, compare, and print; raises AssertionError on a difference."""
    chaos = Chaos(slurm, wanted.faults, wanted.ranks, random.Random(wanted.seed))
    reference = chaos.submit("undisturbed", "at-once", save_every=0)
    chaos.wait_for_account(reference, PATIENCE + chaos.steps)
    print(f"undisturbed: {chaos.steps} steps on {NODES} x {wanted.ranks} ranks", flush=True)
    columns = [disturbed(chaos, reference, wanted)]
    if wanted.compare:
        print("the same faults with restarts.in_place=false", flush=True)
        dice = random.Random(wanted.seed)
        chaos = Chaos(slurm, wanted.faults, wanted.ranks, dice, in_place=False)
        columns.append(disturbed(chaos, reference, wanted))
        print(f"  {'':<18} {'in place':>10} {'requeued':>10}")
    for key in columns[0]:
        print(f"  {key:<18} " + " ".join(f"{column[key]:>10}" for column in columns))
    print(f"seed {wanted.seed}: {wanted.faults} faults, weights and samples are identical")


def disturbed(chaos: Chaos, reference: RunDirectory, wanted: argparse.Namespace) -> dict[str, str]:
    """Train with faults and compare with the run ``reference``; return figures."""
    chaos.write("pace", str(STEPS_PER_FAULT))
    chaos.submit(chaos.run.name, "pace", save_every=5)
    planned = plan(wanted.faults, chaos.dice, wanted.during_restarts, wanted.only)
    met = disturb(chaos, planned)
    chaos.allow(ANY_STEP)
    chaos.wait_for_account(chaos.run, PATIENCE)
    figures = verify(chaos, reference)
    print(table(met), flush=True)
    return figures


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
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also with restarts.in_place=false, and the same faults",
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
        run(slurm, wanted)
    except AssertionError as failure:
        print(f"chaos: seed {wanted.seed}: {failure}", file=sys.stderr)
        return 1
    finally:
        if not wanted.keep:
            cluster.stop(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
