#!/usr/bin/env python3
"""Print the time of communication per step for 8 to 8,192 GPUs, by NCCL's own cost model.

    tools/bench/network_model.py [--gpu h100] [--parameters 1.2] [--layers 16]

No network is measured: see ``hpcrun/train/parallel/network.py``.
"""

import argparse

from hpcrun.train.parallel.network import (
    ANY,
    DETERMINISTIC,
    MACHINES,
    Group,
    ddp,
    default_bucket,
    fsdp,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=MACHINES, default="h100", help="GPU of a DGX (h100)")
    parser.add_argument(
        "--parameters", type=float, default=1.2, help="billions of parameters (1.2)"
    )
    parser.add_argument("--layers", type=int, default=16, help="layers (16)")
    given = parser.parse_args()
    size = given.parameters * 1e9
    print(
        "| GPUs | DDP, 25 MiB | DDP | DDP, any algorithm | FSDP | hybrid FSDP | FSDP, any | hybrid, any |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for ranks in (8, 64, 256, 512, 1024, 4096, 8192):
        group, bucket = Group(ranks, 8, given.gpu), default_bucket(4 * size, ranks) or 25
        times = [
            ddp(size, group, 25, DETERMINISTIC),
            ddp(size, group, bucket, DETERMINISTIC),
            ddp(size, group, bucket),
            *(
                2 * gathered + reduced
                for allowed in (DETERMINISTIC, ANY)
                for hybrid in (False, True)
                for gathered, reduced in [fsdp(size, given.layers, group, allowed, hybrid=hybrid)]
            ),
        ]
        print(f"| {ranks:,} | " + " | ".join(f"{1000 * time:,.0f} ms" for time in times) + " |")


if __name__ == "__main__":
    main()
