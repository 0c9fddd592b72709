"""The same model has the same loss with one process, DDP and FSDP, with any micro-batches or recomputation.

Each test trains with AdamW on the same global batches as a single process.
Tolerances: fp32 only rounds in another order; bf16 keeps three digits.
"""

import itertools

import pytest
import torch
import torch.distributed as dist

from hpcrun.train.step.trainer import AMPTrainer
from tests.support.on_ranks import agreed, ranks
from tests.support.training.parallelism import BUILDERS, Net, Way, batches, flat, trainer
from tests.support.training.small_training import loss

LOSSES = {"fp32": 1e-5, "bf16": 0.05}
WEIGHTS = {"fp32": 5e-6, "bf16": 0.03}
STEPS, FEW = 50, 10
LONG = [
    *(Way(parallel, 2, "fp32", True) for parallel in ("ddp", "fsdp")),
    *(Way(parallel, 4, "bf16", True, accumulation=2) for parallel in ("ddp", "fsdp")),
]


def ways():
    """Yield all combinations of ranks, parallelism, clipping and recomputation; other options in turn."""
    yield Way("single", 1, clip=True, accumulation=4)
    yield Way("single", 1, clip=True, recompute="selective", accumulation=2)
    for parallel in ("ddp", "fsdp"):
        for clip, recompute in itertools.product((False, True), ("none", "full")):
            accumulation = 2 if clip == (recompute == "full") else 1
            yield Way(parallel, 2, "fp32", clip, recompute, accumulation)
        yield Way(parallel, 4, "fp32", True, "selective", 2)
        yield Way(parallel, 4, "bf16", True, accumulation=2)
    yield Way("ddp", 4)
    yield Way("fsdp", 4, recompute="selective", shard="hybrid")
    yield Way("fsdp", 2, clip=True, recompute="full", accumulation=2, reshard=False)


def more_ways():
    """Yield combinations for compilation (seconds each), and the rest of the full product."""
    yield Way("single", 1, clip=True, compiled=True)
    for parallel, recompute in itertools.product(("ddp", "fsdp"), ("none", "full", "selective")):
        yield Way(parallel, 2, "fp32", True, recompute, 2, compiled=True)
    for parallel, count in itertools.product(("ddp", "fsdp"), (2, 4)):
        yield Way(parallel, count, "bf16", True, "selective", compiled=count == 2)
    for parallel, clip, recompute in itertools.product(
        ("ddp", "fsdp"), (False, True), ("none", "full")
    ):
        yield Way(parallel, 4, "fp32", clip, recompute, 2 if clip == (recompute == "full") else 1)


def interrupted_ways():
    """Yield combinations to stop and resume, with dropout."""
    yield Way("single", 1, "fp16", True, "selective", 2)
    yield Way("ddp", 4, "fp16", True, "full", 2)
    yield Way("fsdp", 4, "fp32", True, "full", 2)
    yield Way("fsdp", 2, "fp16", True, shard="hybrid")
    yield Way("fsdp", 2, "bf16", False, "selective", 2, reshard=False)
    yield Way("fsdp", 2, "fp16", True, optimizer="muon")


def more_interrupted_ways():
    """Yield compiled combinations."""
    yield Way("single", 1, clip=True, compiled=True)
    for parallel in ("ddp", "fsdp"):
        yield Way(parallel, 2, "bf16", True, "full", 2, compiled=True)


def ranked(way, *values, marks=()):
    """Return a parameter of a test that runs on the ranks of ``way``."""
    name = "-".join([way.name, *map(str, values)])
    return pytest.param(way, *values, marks=(ranks(way.ranks), *marks), id=name)


def trained(way, rank, steps):
    """Return this rank's loss and the gradient norm of every step, and the final weights (rank 0)."""
    made = trainer(way, rank)
    results = [made.training_step(step, loss) for step in batches(way, rank, 0, steps)]
    whole = made.whole_module()
    return {
        "losses": torch.stack([result.loss.detach() for result in results]),
        "norms": torch.tensor([result.gradient_norm for result in results] if way.clip else []),
        "weights": None if whole is None else flat(whole),
    }


# A wrong number shows in few steps. The sums of many roundings differ after all of them.
@pytest.mark.parametrize(
    ("way", "steps"),
    [
        *(ranked(way, STEPS if way in LONG else FEW) for way in ways()),
        *(ranked(way, STEPS, marks=[pytest.mark.slow]) for way in ways() if way not in LONG),
        *(ranked(way, STEPS, marks=[pytest.mark.slow]) for way in more_ways()),
    ],
)
def test_every_kind_of_parallelism_gives_the_same_training(rank, way, steps):
    found = trained(way, rank, steps)
    dist.all_reduce(found["losses"])
    found["losses"] /= way.ranks
    agreed(found["norms"].tolist())
    if rank > 0:
        return
    alone = trained(Way("single", 1, way.dtype, way.clip), 0, steps)
    for what, relative, absolute in (
        ("losses", LOSSES[way.dtype], LOSSES[way.dtype] / 10),
        ("norms", 10 * LOSSES[way.dtype], LOSSES[way.dtype]),
        ("weights", 0.0, WEIGHTS[way.dtype]),
    ):
        torch.testing.assert_close(found[what], alone[what], rtol=relative, atol=absolute)


@pytest.mark.parametrize(
    "way",
    [
        *(ranked(way) for way in interrupted_ways()),
        *(ranked(way, marks=[pytest.mark.slow]) for way in more_interrupted_ways()),
    ],
)
def test_an_interrupted_compiled_training_has_the_undisturbed_bits(rank, tmp_path, way):
    calm = trainer(way, rank, dropout=0.3)
    torch.manual_seed(100 + rank)
    for number, step in enumerate(batches(way, rank, 0, 6)):
        if number == 3:
            saved = calm.save_checkpoint(tmp_path, 3)
            assert saved.ok, saved.error
        calm.training_step(step, loss)
    again = trainer(way, rank, dropout=0.3, seed=1)
    again.load_checkpoint(tmp_path)
    for step in batches(way, rank, 3, 6):
        again.training_step(step, loss)
    for ours, theirs in zip(local_state(again), local_state(calm), strict=True):
        assert torch.equal(ours, theirs)
    if way.dtype == "fp16":
        # The scale grew after four steps, so the number of steps since its growth was restored.
        assert [calm.scaler.get_scale(), again.scaler.get_scale()] == [2048.0, 2048.0]
    again.save_checkpoint(tmp_path, 6)
    whole = calm.whole_module()
    if whole is not None:
        # A single process without parallelism loads the checkpoint.
        plain = AMPTrainer(Net(0.3), BUILDERS[way.optimizer], device="cpu")
        plain.load_checkpoint(tmp_path)
        assert torch.equal(flat(plain.module), flat(whole))


def local_state(made):
    """Return this rank's weights, buffers and optimizer moments."""
    values = [*made.module.parameters(), *made.module.buffers()]
    for moments in made.optimizer.state.values():
        values += [value for value in moments.values() if isinstance(value, torch.Tensor)]
    return [value.to_local() if hasattr(value, "to_local") else value for value in values]
