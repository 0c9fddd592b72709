#!/usr/bin/env python3
"""Time from a fault to the end of the next step, on a dev cluster, for hpcrun and for other systems.

Four ranks on two nodes train a small model on the CPU and save every ten steps. After a save rank 3 is
killed (crash) or stopped (hang), or its node loses power (lost node). Then each system goes on by itself:

    in place      hpcrun starts the ranks as a new step of the same job; after a lost node on a spare
    requeue       hpcrun with restarts.in_place=false
    torchrun      torchrun --max-restarts on each node, with a plain script that saves and loads a file
    ft_launcher   the same script under nvidia-resiliency-ext, if pip can install it

The columns: "end" until srun has ended, "decide" until hpcrun has recorded cause and decision, "start" until
the new process of rank 0 exists (Slurm, or the queue), "import" Python and modules, "join" the
rendezvous of the ranks (in hpcrun also the import of torch, unless a fork server has it), "restore" the build
and the checkpoint, "step" the first step; then the total. A hang includes the watchdog's limit of five
seconds. torchrun has no watchdog, and no free node for a lost one. The dev cluster holds a requeued job for
5 seconds, Slurm by default for two minutes.

    tools/bench/restart.py                                  (as root; see docs/devcluster.md)
    tools/bench/restart.py --rounds 5 --cases crash --picture restarts.png
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

# This checkout's modules come before an installed package.
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tools" / "bench")]

from restartlib.picture import draw  # noqa: E402
from restartlib.place import VICTIM, Ends, Place, Stuck, wait  # noqa: E402
from restartlib.systems import (  # noqa: E402
    PARTS,
    Hpcrun,
    Launcher,
    ft_launcher,
    install_ft_launcher,
    process_start,
    torchrun,
)

from hpcrun.config.schema import Job  # noqa: E402
from tests.on_slurm import cluster  # noqa: E402
from tests.on_slurm.cluster import SlurmCluster  # noqa: E402

System: TypeAlias = Hpcrun | Launcher
Found: TypeAlias = dict[tuple[str, str], list[dict[str, float]]]
"""The seconds of each part, for each round, by case and system."""
CASES = ("crash", "hang", "lost node")
SYSTEMS = ("in place", "requeue", "torchrun", "ft_launcher")
TOTAL = "total"
_numbers = itertools.count(1)
# Seconds. Most faults come long after a start, so the fork servers are ready, here also on two busy cores.
_TRAINED = 60.0


def makers(
    slurm: SlurmCluster, wanted: argparse.Namespace
) -> dict[tuple[str, str], Callable[[Place], System]]:
    """Return how to make the system of each case and name, without those that cannot be measured."""
    spares = int("spares" in Job.model_fields)
    packages = slurm.shared / "ft"
    problem = install_ft_launcher(packages) if "ft_launcher" in wanted.systems else None
    if problem is not None:
        print(f"restart: ft_launcher cannot be used: {problem}", file=sys.stderr)

    def ft(place: Place) -> Launcher:
        return ft_launcher(place, packages / "packages")

    found: dict[tuple[str, str], Callable[[Place], System]] = {}
    for case in CASES:
        lost = spares if case == "lost node" else 0
        if case != "lost node" or spares:
            found[case, "in place"] = lambda place, lost=lost: Hpcrun(  # type: ignore[misc]
                place, in_place=True, spares=lost
            )
        else:
            print("restart: no job.spares here: a lost node causes a requeue", file=sys.stderr)
        found[case, "requeue"] = lambda place: Hpcrun(place, in_place=False)
        if case == "crash":
            found[case, "torchrun"] = torchrun
        if case != "lost node" and problem is None:
            found[case, "ft_launcher"] = ft
    return {
        key: make
        for key, make in found.items()
        if key[0] in wanted.cases and key[1] in wanted.systems
    }


def measure(
    slurm: SlurmCluster, case: str, make: Callable[[Place], System]
) -> dict[str, float] | None:
    """Start a run, disturb it, and return the seconds of each part of its restart; None without a restart."""
    place = Place(slurm, f"run-{next(_numbers)}")
    system = make(place)
    try:
        system.start()
        wait(lambda: system.saves() >= 2 and place.trained() >= _TRAINED, "two saves")
        old, victim = place.newest(0), place.newest(VICTIM)
        launchers = Ends(system.launchers())
        fault = time.time()
        if case == "lost node":
            slurm.cut_link(victim.host)
            slurm.kill_node(victim.host)
        else:
            os.kill(victim.pid, signal.SIGKILL if case == "crash" else signal.SIGSTOP)
        wait(lambda: launchers.look() and bool(place.resumed(old, fault)), "the next step")
        new = place.resumed(old, fault)
        begun = process_start(new[0].pid)
        return durations(fault, system.parts(fault, launchers.at, new, begun))
    except Stuck as stuck:
        print(f"restart: {case}: {stuck}\n{system.story()}", file=sys.stderr, flush=True)
        return None
    finally:
        place.end()


def durations(fault: float, ends: dict[str, float]) -> dict[str, float]:
    """Return the length of each part, from the times of their ends; 0 for a part that ended earlier."""
    found, before = {}, fault
    for part, end in ends.items():
        found[part] = max(0.0, end - before)
        before = max(before, end)
    return found | {TOTAL: before - fault}


def row(case: str, system: str, seconds: dict[str, float], ratio: float | None) -> str:
    """Return a row of the table."""
    cells = [f"{seconds[part]:.1f}" if part in seconds else "" for part in (*PARTS, TOTAL)]
    return (
        f"| {case} | {system} | {' | '.join(cells)} | {'' if ratio is None else f'{ratio:.1f}'} |"
    )


def medians(found: Found) -> dict[tuple[str, str], dict[str, float]]:
    """Return the median of each part, by case and system."""
    return {
        key: {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}
        for key, rounds in found.items()
    }


def table(middle: dict[tuple[str, str], dict[str, float]]) -> list[str]:
    """Return the table of medians, with the ratio of each total to that of the restart in place."""
    lines = [
        f"| case | system | {' | '.join((*PARTS, TOTAL))} | ratio |",
        f"|---|---|{'---:|' * (len(PARTS) + 2)}",
    ]
    for (case, system), seconds in middle.items():
        base = middle.get((case, "in place"))
        lines.append(row(case, system, seconds, base and seconds[TOTAL] / base[TOTAL]))
    return lines


def main() -> int:
    """Measure in turns, and print the table; return 2 if there can be no cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds (default 3)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the medians")
    wanted = parser.parse_args()
    why_not = cluster.why_not()
    if why_not is not None:
        print(f"restart: {why_not}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found: Found = {}
    name = f"bench-restart-{os.getpid()}"
    try:
        slurm = cluster.start(name, nodes=4)
        compared = makers(slurm, wanted)
        for _ in range(wanted.rounds):
            for (case, system), make in compared.items():
                seconds = measure(slurm, case, make)
                if seconds is not None:
                    found.setdefault((case, system), []).append(seconds)
                    print(row(case, system, seconds, None), file=sys.stderr, flush=True)
    finally:
        cluster.stop(name)
    if wanted.json is not None:
        lines = [{"case": c, "system": s, "seconds": rounds} for (c, s), rounds in found.items()]
        wanted.json.write_text(json.dumps(lines, indent=2) + "\n")
    if wanted.picture is not None:
        draw(medians(found), wanted.picture)
    print("\n".join(table(medians(found))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
