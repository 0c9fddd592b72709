"""Loops of ranks with different numbers of batches: ``trainer.even``, and the line about an ended rank."""

import os
import re

import pytest
import torch

from hpcrun import (
    AMPTrainer,
    DistributedAMPTrainer,
    MicroBatches,
    cleanup_distributed,
    setup_distributed,
)
from tests.support.on_ranks import agreed, forked, ranks
from tests.support.ports import free_port
from tests.support.training.forks import fork_ranks
from tests.support.training.parallelism import Net, adamw, flat
from tests.support.training.small_training import loss


def batches(rank, count):
    """Return batches of a rank; the last batch is smaller."""
    generator = torch.Generator().manual_seed(10 + rank)
    found = []
    for index in range(count):
        inputs = torch.randn(3 if index == count - 1 else 8, 6, generator=generator)
        found.append((inputs, inputs.sin().sum(1)))
    return found


def make(**options):
    torch.manual_seed(0)
    made = DistributedAMPTrainer(Net(), adamw, device="cpu", clip_norm=0.5, **options)
    made.wrap_model()
    return made


def reference(counts, *, by_samples):
    """Return the weights of one process that trains on the batches of all ranks, and the losses."""
    torch.manual_seed(0)
    made = AMPTrainer(Net(), adamw, device="cpu", clip_norm=0.5)
    given = [batches(rank, count) for rank, count in enumerate(counts)]
    losses = []
    for step in range(max(counts)):
        present = MicroBatches(own[step] for own in given if step < len(own))
        sizes = [len(x) for x, _ in present] if by_samples else None
        losses.append(made.training_step(present, loss, sizes).item())
    return flat(made.module), losses


@pytest.mark.parametrize("by_samples", [False, True], ids=["ranks", "samples"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@ranks(2)
def test_ranks_with_unequal_batches_train_as_one_process(rank, parallel, by_samples):
    for counts in ((5, 3), (0, 2)):
        made, means = make(parallel=parallel), []
        for batch in made.even(batches(rank, counts[rank])):
            sizes = [len(batch[0])] if by_samples else None
            means.append(made.mean(made.training_step(batch, loss, sizes)))
        weights, losses = reference(counts, by_samples=by_samples)
        assert agreed(means) == pytest.approx(losses, rel=1e-5)
        assert agreed(made.steps) == max(counts)
        whole = made.whole_module()
        if whole is not None:
            torch.testing.assert_close(flat(whole), weights)
        if parallel == "ddp":
            moments = made.optimizer.state_dict()["state"].values()
            agreed([flat(made.module).tolist(), [m["exp_avg"].tolist() for m in moments]])
        # After the loop, a step without weights is the mean over all ranks again.
        result = made.training_step(batches(rank, 2)[0], loss)
        assert result.weights == ()
        assert made.gate.skipped == 0


def test_one_process_gets_its_batches():
    made = AMPTrainer(Net(), adamw, device="cpu")
    given = batches(0, 3)
    assert [id(batch) for batch in made.even(given)] == [id(batch) for batch in given]


@forked
def test_a_rank_that_ends_early_is_named(tmp_path):
    for early in (0, 1):
        (logs := tmp_path / f"logs-{early}").mkdir()

        def play(rank, early=early, port=free_port()):  # noqa: B008
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            setup_distributed(timeout=60)
            made = make()
            for batch in batches(rank, 3 if rank == early else 5):
                made.training_step(batch, loss)
            # Without the cleanup, the function at the exit of the interpreter does the same.
            cleanup_distributed()

        codes = fork_ranks(2, play, logs)
        line = (
            rf"rank {early} \(\S+\) has ended after 3 steps, and rank {1 - early} waits for it in step 4: "
            r"the ranks have different numbers of batches; .* trainer\.even\(loader\)"
        )
        for rank in (0, 1):
            log = (logs / f"rank-{rank}.log").read_text()
            assert re.search(line, log), log
        assert 0 not in codes
