#!/usr/bin/env python3
"""Compare the network check, all pairs in parallel rounds, with iperf3 on one pair after the other.

Both run on one dev cluster, over the same pairs, and measure each pair for the same time. Then come
trials with faults at random places, and without; the table counts the trials that named exactly the fault.

    tools/bench/netcheck.py --nodes 8 --seconds 3             (as root; see docs/devcluster.md)
    tools/bench/netcheck.py --nodes 8 --seconds 1 --trials 20
"""

import argparse
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

# This checkout's modules come before an installed package.
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from tests.on_slurm import cluster, planted_faults  # noqa: E402
from tests.on_slurm.cluster import SlurmCluster  # noqa: E402

_LIMIT = 1.3
"""The rounds should take no more than this many times their measurements."""


def check(slurm: SlurmCluster, seconds: float) -> dict[str, Any]:
    """Return the report of a check over all nodes, without the all-reduce."""
    words = ["--seconds", str(seconds), "--streams", "1", "--all-reduce", "0"]
    return planted_faults.check(slurm, *words)


def serial(slurm: SlurmCluster, seconds: float) -> float:
    """Return the seconds that iperf3 takes for every pair, one after the other."""
    begun = time.monotonic()
    for server, client in itertools.combinations(slurm.nodes, 2):
        serving = slurm.popen(["iperf3", "-s", "-1"], host=server)
        time.sleep(0.2)
        command = ["iperf3", "-c", server, "-t", str(max(1, round(seconds))), "-J"]
        answer = json.loads(slurm.run(command, host=client, check=False).stdout)
        if "error" in answer:
            print(f"netcheck: {client} to {server}: {answer['error']}", file=sys.stderr)
        serving.kill()
        serving.wait()
    return time.monotonic() - begun


def compare(slurm: SlurmCluster, seconds: float) -> None:
    """Print the times of both methods over the same pairs."""
    count = len(slurm.nodes)
    ours = check(slurm, seconds)["seconds"]
    rounds = count - 1 + count % 2
    share = ours / (rounds * seconds)
    print(f"{count} nodes, {seconds:g} s a pair")
    print(
        f"  netcheck, {rounds} rounds  {ours:7.1f} s  {share:.2f} x (N - 1) x T, at most {_LIMIT} wanted"
    )
    if slurm.run(["which", "iperf3"], check=False).returncode != 0:
        print("  iperf3 is not installed: no comparison with one pair after the other")
    else:
        theirs, pairs = serial(slurm, seconds), count * (count - 1) // 2
        print(f"  iperf3, {pairs} pairs     {theirs:7.1f} s  {theirs / ours:.1f} x netcheck")


def try_faults(slurm: SlurmCluster, trials: int, seconds: float, seed: int) -> bool:
    """Print the number of trials that named exactly the fault; return True if all did."""
    perfect = True
    for fault in planted_faults.FAULTS if trials else ():
        right = 0
        for trial in range(trials):
            with planted_faults.planted(
                slurm, fault, random.Random(f"{fault} {seed + trial}")
            ) as is_right:
                report = check(slurm, seconds)
            if is_right(report):
                right += 1
            else:
                print(f"  {fault}, seed {seed + trial}: {planted_faults.named(report)}", flush=True)
        perfect &= right == trials
        print(f"  {fault:<10} right in {right} of {trials} trials", flush=True)
    return perfect


def main() -> int:
    """Run on a new cluster; return 1 if a trial failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=8, metavar="N", help="hosts (default 8)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, metavar="T", help="seconds per round (default 3)"
    )
    parser.add_argument(
        "--trials", type=int, default=0, metavar="K", help="trials per fault (default 0)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the trials")
    wanted = parser.parse_args()
    why_not = cluster.why_not()
    if why_not is not None:
        print(f"netcheck: {why_not}", file=sys.stderr)
        return 2
    name = f"bench-netcheck-{os.getpid()}"
    try:
        slurm = cluster.start(name, nodes=wanted.nodes)
        compare(slurm, wanted.seconds)
        perfect = try_faults(slurm, wanted.trials, wanted.seconds, wanted.seed)
    finally:
        cluster.stop(name)
    return int(not perfect)


if __name__ == "__main__":
    sys.exit(main())
