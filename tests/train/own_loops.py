"""Program of ``test_own_loop.py``: the documented script on one rank and on two, with disturbances, and two
ranks that use the trainer as the page describes.

``python -m tests.train.own_loops SCRIPT FOLDER`` writes ``NAME-PART/rank-0.log``, ``codes.json``,
``beside-RANK.json`` and ``own-RANK.json`` into the folder. The ranks get torchrun's variables; torchrun
itself would import torch again for each rank.
"""

import builtins
import json
import os
import runpy
import secrets
import signal
import sys
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist

from hpcrun import DistributedAMPTrainer, cleanup_distributed, setup_distributed
from hpcrun.cluster.network.ports import is_free, port_candidates
from hpcrun.errors import UserError
from tests.train import gan
from tests.train.forks import fork_ranks

# Each part resumes from the previous part: the output line after which rank 0 gets the signal.
DISTURBANCES = [("step 100:", signal.SIGKILL), ("step 150:", signal.SIGTERM), None]

IMPORTED_ONCE = (DistributedAMPTrainer, torch._dynamo)


def play(rank: int, world_size: int, port: int, script: Path, disturbance) -> None:
    """Run the script as a rank."""
    surround(rank, world_size, port)
    if disturbance is not None:
        line, number = disturbance
        original = builtins.print

        def disturbed(*values, **options):
            original(*values, **options)
            if values and str(values[0]).startswith(line):
                os.kill(os.getpid(), number)

        builtins.print = disturbed
    runpy.run_path(str(script), run_name="__main__")


def surround(rank: int, world_size: int, port: int) -> None:
    """Set the environment of a rank in this process."""
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


def beside(rank: int, port: int, folder: Path) -> None:
    """Run as one of two ranks: two trainers, and a trainer that is used too early."""
    surround(rank, 2, port)
    found = {parallel: sharing_by(parallel, rank, folder) for parallel in ("ddp", "fsdp")}
    (folder / f"beside-{rank}.json").write_text(json.dumps(found))
    cleanup_distributed()


def sharing_by(parallel, rank: int, folder: Path) -> dict[str, object]:
    """Return the results of two trainers, and the error of an unwrapped trainer."""

    def trainer(net, make):
        made = DistributedAMPTrainer(net, make, parallel=parallel, device="cpu")
        made.setup_distributed()
        return made

    def wrapped(net, make):
        made = trainer(net, make)
        made.wrap_model()
        return made

    early = trainer(gan.nets()[0], gan.sgd)
    return {
        "gan": gan.by_trainers(wrapped, rank, 2).tolist(),
        "step": refused(lambda: early.training_step([torch.ones(2, 3)], gan.generators_loss)),
        "optimizer": refused(lambda: early.optimizer),
        "load": refused(lambda: early.load_checkpoint(folder / "none")),
        "whole": refused(early.whole_module),
    }


def own_group(rank: int, port: int, folder: Path) -> None:
    """Run as one of two ranks that only ``init_process_group`` numbers, as in programs with mp.spawn."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)

    def trainer():
        return DistributedAMPTrainer(
            torch.nn.Linear(2, 1), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), device="cpu"
        )

    early = trainer()
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    found = {
        "early wrap": refused(early.wrap_model),
        "early step": refused(
            lambda: early.training_step([torch.ones(1, 2)], lambda m, b: m(b).sum())
        ),
        "early setup": refused(early.setup_distributed),
    }
    made = trainer()
    place = made.setup_distributed()
    made.wrap_model()
    inputs = torch.full((1, 2), float(rank + 1))
    made.training_step([inputs], lambda model, batch: model(batch).sum())
    outcome = made.save_checkpoint(folder / "own-checkpoints", 1)
    found |= {
        "place": [place.rank, place.world_size, place.local_rank, place.num_gpus_per_node],
        "method": [place.launch_method, place.backend],
        "main": made.is_main_process,
        "saved": outcome.ok,
        "weights": torch.cat([w.flatten() for w in made.module.parameters()]).tolist(),
    }
    os.environ |= {"RANK": str(1 - rank), "LOCAL_RANK": str(1 - rank)}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    found["crossed"] = refused(setup_distributed)
    (folder / f"own-{rank}.json").write_text(json.dumps(found))
    cleanup_distributed()


def refused(ask) -> str | None:
    """Return the error of ``ask`` for a wrong order of calls."""
    try:
        ask()
    except (RuntimeError, UserError) as error:
        return str(error)
    return None


def free_port() -> int:
    """Return a free port that the kernel does not give to other programs."""
    candidates = port_candidates(str(secrets.randbelow(2**26)))
    return next(port for port in candidates if is_free("127.0.0.1", port))


def main(script: Path, folder: Path) -> None:
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
    port = free_port()
    codes["beside"] = fork_ranks(2, lambda rank: beside(rank, port, folder))
    own_port = free_port()
    codes["own"] = fork_ranks(2, lambda rank: own_group(rank, own_port, folder))
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
