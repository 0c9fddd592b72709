"""Three ranks with batches that do not divide evenly, against one process with the whole batches."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from hpcrun.config import AMPConfig
from hpcrun.train.data.batching import Batching
from hpcrun.train.step.micro_batches import MicroBatchStep
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.validation import ValidationData, validate
from tests.support.on_ranks import agreed, ranks
from tests.support.training.small_training import digest, small
from tests.support.training.uneven import SIZE, WORLD, Counted, Masked, Plain, Tokens, Work

FP16 = AMPConfig(dtype="fp16", init_scale=64.0)


def mean_losses(work, steps):
    """Return the losses of the steps, averaged over the ranks."""
    losses = torch.stack(work.steps(0, steps))
    dist.all_reduce(losses)
    return losses / WORLD


def flat(tensors):
    return torch.cat([value.flatten() for value in tensors])


@pytest.mark.parametrize(
    ("both", "together", "alone"),
    [
        pytest.param({}, {}, {}, id="a batch that does not divide"),
        pytest.param({}, {"accumulation": 2}, {}, id="nor with accumulation"),
        # Two of 18 micro-batches are padding.
        pytest.param({"amp": FP16}, {"accumulation": 6}, {}, id="padded in fp16"),
        pytest.param(
            *({}, {"parallel": "fsdp", "accumulation": 6}, {"parallel": "single"}),
            id="padded, sharded",
        ),
        pytest.param({"task": Masked()}, {"accumulation": 6}, {}, id="tokens"),
        pytest.param({"task": Counted()}, {"accumulation": 6}, {}, id="numbers of tokens"),
        # A run of 16 samples, at most 3 per micro-batch, that continues on one rank.
        pytest.param({}, {"accumulation": 2}, {"accumulation": 6}, id="more turns on fewer ranks"),
    ],
)
@ranks(WORLD)
def test_three_ranks_train_like_one_process_on_the_same_batches(rank, both, together, alone):
    tolerance = 1e-3 if "amp" in both else 1e-5
    three, one = Work(rank, **both, **together), Work(0, 1, **both, **alone)
    losses, expected = mean_losses(three, 9), torch.stack(one.steps(0, 9))
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    agreed(digest(three.weights()))
    torch.testing.assert_close(
        flat(three.weights()), flat(one.weights()), rtol=tolerance, atol=tolerance
    )


@ranks(WORLD)
def test_validation_is_the_mean_over_all_tokens(rank):
    work = Work(rank, task=Masked(), ema=0.9)
    work.steps(0, 4)
    everyone = work.trainer.control_ranks()
    data = ValidationData(Tokens(), everyone, batch_size=8, accumulation=1, limit=None, workers=1)
    found = agreed([validate(work.trainer, work.task, data, ranks=everyone) for _ in range(2)])
    data.close()
    everything = default_collate([Tokens()[index] for index in range(SIZE)])
    with torch.no_grad():
        plain = work.task.loss(work.trainer.module, everything).item()
        with work.trainer.averaged():
            averaged = work.task.loss(work.trainer.module, everything).item()
    assert found == pytest.approx([averaged] * 2, rel=1e-5)
    assert plain != pytest.approx(averaged, rel=1e-3)


@ranks(WORLD)
def test_averages_are_saved_in_shards_and_load_whole(rank, tmp_path):
    options = {"ema": 0.9, "accumulation": 2}
    sharded = Work(rank, parallel="fsdp", **options)
    sharded.steps(0, 5)
    shards = sharded.trainer.average.tensors()
    saved = sharded.trainer.save_checkpoint(tmp_path, 5)
    assert saved.ok, saved.error
    copies = Work(rank, **options)
    copies.trainer.load_checkpoint(tmp_path)
    whole = copies.trainer.average.tensors()
    straight = Work(rank, **options)
    straight.steps(0, 5)
    own = straight.trainer.average.tensors()
    assert all(isinstance(value, DTensor) for value in shards.values())
    for name, value in whole.items():
        assert torch.equal(shards[name].full_tensor(), value)
        torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-6)


def test_a_task_that_weights_only_some_batches_is_refused():
    class Fickle(Plain):
        def weight(self, batch):
            return None if batch else 2.0

    trainer = DistributedAMPTrainer(
        small(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), device="cpu"
    )
    take = MicroBatchStep(trainer, Fickle(), Batching(8, 1, 2))
    with pytest.raises(TypeError, match=r"Fickle.weight\(\) gave None for one batch"):
        take(0, [[], [1]])
