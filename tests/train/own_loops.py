"""Program of ``test_own_loop.py``: the documented script on one rank and on two, with disturbances.

``python -m tests.train.own_loops FOLDER SCRIPT`` writes ``NAME-PART/rank-0.log`` and ``codes.json`` into the
folder. The ranks get torchrun's variables; torchrun itself would import torch again for each rank.
"""

import builtins
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo

from hpcrun import DistributedAMPTrainer
from tests.ports import free_port
from tests.train.forks import fork_ranks

# Each part resumes from the previous part: the output line after which rank 0 gets the signal.
DISTURBANCES = [("step 100:", signal.SIGKILL), ("step 150:", signal.SIGTERM), None]

IMPORTED_ONCE = (DistributedAMPTrainer, torch._dynamo)


def play(rank: int, world_size: int, port: int, script: Path, disturbance) -> None:
    """Run the script as a rank."""
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    if disturbance is not None:
        line, number = disturbance
        original = builtins.print

        def disturbed(*values, **options):
            original(*values, **options)
            if values and str(values[0]).startswith(line):
                os.kill(os.getpid(), number)

        builtins.print = disturbed
    runpy.run_path(str(script), run_name="__main__")


def main(folder: Path, script: Path) -> None:
    """Run all parts and write the exit codes."""
    codes = {}
    for name, world_size in (("alone", 1), ("two", 2)):
        place = folder / name
        place.mkdir()
        os.chdir(place)
        for part, disturbance in enumerate(DISTURBANCES):
            logs = folder / f"{name}-{part}"
            logs.mkdir()
            port = free_port()
            codes[f"{name}-{part}"] = fork_ranks(
                world_size,
                lambda rank, w=world_size, p=port, d=disturbance: play(rank, w, p, script, d),
                logs,
            )
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
