"""Program of ``test_equivalence.py``: the same training with every kind of parallelism.

``python -m tests.train.equivalence FOLDER [slow]`` writes ``results-WORLD-RANK.json`` into the folder.
"""

import contextlib
import itertools
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DDP would import it after the fork
import torch.distributed as dist
import torch.distributed.fsdp

from hpcrun.train.step.trainer import AMPTrainer
from tests.train.forks import fork_ranks
from tests.train.nccl_rules import nccl_rules
from tests.train.sharing import BUILDERS, Net, Way, batches, flat, loss, trainer
from tests.train.sharing_scenarios import SCENARIOS

STEPS = 50


def ways():
    """Return all combinations of ranks, parallelism, clipping and recomputation; other options in turn."""
    for dtype, clip in (("fp32", False), ("fp32", True), ("bf16", True)):
        yield Way("single", 1, dtype, clip)
    yield Way("single", 1, clip=True, accumulation=4)
    yield Way("single", 1, clip=True, recompute="selective", accumulation=2)
    for parallel in ("ddp", "fsdp"):
        for clip, recompute in itertools.product((False, True), ("none", "full")):
            accumulation = 2 if clip == (recompute == "full") else 1
            yield Way(parallel, 2, "fp32", clip, recompute, accumulation)
        yield Way(parallel, 4, "fp32", True, "every", 2)
        yield Way(parallel, 4, "bf16", True, accumulation=2)
    yield Way("ddp", 4)
    yield Way("fsdp", 4, recompute="selective", wrap="size", shard="hybrid")
    yield Way(
        "fsdp", 2, clip=True, recompute="every", accumulation=2, wrap="classes", reshard=False
    )


def more_ways():
    """Return combinations for compilation (seconds each), and the rest of the full product."""
    yield from [way for way in ways() if way.parallel == "single"]
    yield Way("single", 1, clip=True, compiled=True)
    for parallel, recompute in itertools.product(("ddp", "fsdp"), ("none", "full", "selective")):
        yield Way(parallel, 2, "fp32", True, recompute, 2, compiled=True)
    for parallel, ranks in itertools.product(("ddp", "fsdp"), (2, 4)):
        yield Way(parallel, ranks, "bf16", True, "every", compiled=ranks == 2)
    for parallel, clip, recompute in itertools.product(
        ("ddp", "fsdp"), (False, True), ("none", "full")
    ):
        yield Way(parallel, 4, "fp32", clip, recompute, 2 if clip == (recompute == "full") else 1)


def interrupted_ways():
    """Return combinations to stop and resume, with dropout."""
    yield Way("single", 1, "fp16", True, "selective", 2)
    yield Way("ddp", 4, "fp16", True, "full", 2)
    yield Way("fsdp", 4, "fp32", True, "every", 2, wrap="classes")
    yield Way("fsdp", 2, "fp16", True, shard="hybrid")
    yield Way("fsdp", 2, "bf16", False, "selective", 2, reshard=False)
    yield Way("fsdp", 2, "fp16", True, optimizer="muon")


def more_interrupted_ways():
    """Return compiled combinations."""
    yield Way("single", 1, clip=True, compiled=True)
    for parallel in ("ddp", "fsdp"):
        yield Way(parallel, 2, "bf16", True, "full", 2, compiled=True)


def trained(way, rank):
    """Return losses over all ranks and gradient norms of every step, and the final weights (rank 0)."""
    made = trainer(way, rank)
    results = [made.training_step(step, loss) for step in batches(way, rank, 0, STEPS)]
    losses = torch.stack([result.loss for result in results])
    if way.ranks > 1:
        dist.all_reduce(losses)
    whole = made.whole_module()
    return {
        "losses": (losses / way.ranks).tolist(),
        "norms": [result.gradient_norm.item() for result in results] if way.clip else [],
        "weights": [] if whole is None else flat(whole),
    }


def interrupted(way, rank, folder):
    """Return if six steps equal three steps, a save, and three steps in a new trainer, bit by bit."""
    calm = trainer(way, rank, dropout=0.3)
    torch.manual_seed(100 + rank)
    for number, step in enumerate(batches(way, rank, 0, 6)):
        if number == 3 and not (saved := calm.save_checkpoint(folder, 3)).ok:
            return saved.error
        calm.training_step(step, loss)
    again = trainer(way, rank, dropout=0.3, seed=1)
    again.load_checkpoint(folder)
    for step in batches(way, rank, 3, 6):
        again.training_step(step, loss)
    same = all(map(torch.equal, local_state(calm), local_state(again)))
    again.save_checkpoint(folder, 6)
    whole = calm.whole_module()
    return {
        "same": same,
        "scale": [calm.scaler.get_scale(), again.scaler.get_scale()],
        "drawn": torch.rand(1).item(),
        "weights": [] if whole is None else flat(whole),
    }


def local_state(made):
    """Return this rank's weights, buffers and optimizer moments."""
    values = [*made.module.parameters(), *made.module.buffers()]
    for moments in made.optimizer.state.values():
        values += [value for value in moments.values() if isinstance(value, torch.Tensor)]
    return [value.to_local() if hasattr(value, "to_local") else value for value in values]


def in_plain_hands(way, folder):
    """Return the weights of the newest checkpoint, as a single process without parallelism loads them."""
    made = AMPTrainer(Net(0.3), BUILDERS[way.optimizer], device="cpu")
    made.load_checkpoint(folder)
    return flat(made.module)


def main(folder, slow):
    """Train with all combinations; the exit status is 0 only if every rank succeeds."""
    trainings = list(more_ways() if slow else ways())
    stopped = list(more_interrupted_ways() if slow else interrupted_ways())

    def play(rank, ranks):
        found = {}
        for way in trainings:
            if way.ranks == ranks:
                found[way.name] = trained(way, rank)
        for way in stopped:
            if way.ranks == ranks:
                found[f"stopped {way.name}"] = interrupted(way, rank, folder / way.name)
            if ranks == 1:
                found[f"plain {way.name}"] = in_plain_hands(way, folder / way.name)
        for scenario in SCENARIOS.get(ranks, ()):
            if not slow:
                found[scenario.__name__] = scenario(rank)
        return found

    codes = []
    for ranks in (4, 2, 1):
        codes += fork_ranks(ranks, lambda rank, ranks=ranks: joined(play, folder, rank, ranks))
    return int(any(codes))


def joined(play, folder, rank, ranks):
    """Run in a process group of these ranks, and write the results."""
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(str(folder / f"rendezvous-{ranks}"), ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
        )
    with nccl_rules() if ranks > 1 else contextlib.nullcontext():
        found = play(rank, ranks)
    (folder / f"results-{ranks}-{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "slow" in sys.argv[2:]))
