#!/usr/bin/env python3
"""Record the output of one version of Slurm in ``tests/slurm/recorded/VERSION``.

Starts a dev cluster with accounting, brings jobs into every state and to every kind of end, and records the
output that hpcrun's parsers read. Job ids and times differ between recordings.

    tools/record_slurm.py 26.05       (as root; see docs/devcluster.md)
"""

import argparse
import os
import signal
import sys
from pathlib import Path

# This checkout's modules come before an installed package.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from recordlib import endings, environments, memory, nodes, qos, refusals, states  # noqa: E402
from recordlib.site import Site  # noqa: E402

from tests.on_slurm import cluster  # noqa: E402

PARTS = {
    part.__name__.rpartition(".")[2]: part
    for part in (environments, states, endings, nodes, refusals, qos, memory)
}


def main() -> int:
    """Record all parts; return 0 when each part was recorded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("version", metavar="VERSION", help="version of Slurm, such as 26.05")
    parser.add_argument(
        "--system", action="store_true", help="use the system's Slurm, of this version"
    )
    parser.add_argument("--part", choices=PARTS, help="record only this part")
    parser.add_argument("--into", type=Path, default=ROOT / "tests/slurm/recorded")
    wanted = parser.parse_args()
    # SIGTERM also removes the cluster.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name = f"record-{os.getpid()}"
    version = "" if wanted.system else wanted.version
    try:
        slurm = cluster.start(name, nodes=5, grace_s=8, accounting=True, slurm=version)
        if f" {wanted.version}." not in slurm.admin("scontrol", "--version"):
            raise AssertionError(f"the system's Slurm is not {wanted.version}")
        site = Site(slurm, wanted.into / wanted.version)
        for part in [wanted.part] if wanted.part else PARTS:
            print(f"{wanted.version}: {part}", flush=True)
            PARTS[part].record(site)
        if not wanted.part:
            site.keep_json("jobs.json", site.jobs)
    except (AssertionError, RuntimeError) as failure:
        print(f"record_slurm: {failure}", file=sys.stderr)
        return 1
    finally:
        cluster.stop(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
