"""Compressed gradients under DDP: interruptions, the loss scale, and overflows change no bit."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from hpcrun.config import AMPConfig, ConfigError
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.parallel.comm_hooks import ErrorFeedback
from hpcrun.train.step.trainer import DistributedAMPTrainer
from tests.support import jobs
from tests.support.on_ranks import agreed, forked, ranks
from tests.support.training.faulty_tasks import Exact
from tests.support.training.runs import DONE, play_run
from tests.support.training.small_training import batches, config, digest, loss, make_trainer

FP16 = AMPConfig(dtype="fp16", init_scale=1024.0, growth_interval=2)
OPTIONS = {"powersgd_rank": 2, "powersgd_start": 2}
HOOKS = ("fp16", "bf16", "powersgd")
OVERFLOWS = {6, 9}


def backwards():
    """A model with several buckets, whose gradients are ready in another order than declared."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.middle, self.first = (
                nn.Linear(24, 1),
                nn.Linear(24, 24),
                nn.Linear(6, 24),
            )

        def forward(self, inputs):
            return self.last(self.middle(self.first(inputs).tanh()).tanh())

    return Backwards()


def trainer(rank, hook):
    return make_trainer(
        rank, 2, backwards, amp=FP16, comm_hook=hook, described={"bucket_mb": 0.001}, **OPTIONS
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def overflowing(model, batch):
    return loss(model, batch) * torch.inf


def advance(made, rank, first, last):
    for step, parts in enumerate(batches(rank, 2, first, last, accumulation=2), first):
        result = made.training_step(parts, overflowing if step in OVERFLOWS else loss)
        assert result.skipped == (step in OVERFLOWS)


@ranks(2, 2, 2)
def test_two_interruptions_of_a_trainer_change_no_bit(rank, tmp_path, phase):
    """The second attempt ends after an overflow, and between two changes of the scale."""
    first, last = ((0, 5), (5, 8), (8, 13))[phase]
    ends = {}
    for hook in HOOKS:
        made = trainer(rank, hook)
        restored = made.load_checkpoint(tmp_path / hook)
        assert (restored.step if restored else 0) == first
        advance(made, rank, first, last)
        assert made.save_checkpoint(tmp_path / hook, last).ok
        if phase == 2:
            cut = digest(made.module.parameters())
            made = trainer(rank, hook)
            advance(made, rank, 0, last)
            ends[hook] = agreed(digest(made.module.parameters()))
            assert cut == ends[hook], hook
            assert all(p.isfinite().all() for p in made.module.parameters())
            assert made.scaler.get_scale() > 1024.0
    assert len({*ends.values()}) == len(ends)


@ranks(2, 2)
def test_a_load_before_the_wrapping_restores_the_hook(rank, tmp_path, phase):
    """Of an argument, and of a wrapper that the program has made."""
    for own in (False, True):
        made, folder = trainer(rank, "powersgd"), tmp_path / str(own)
        if phase == 0:
            advance(made, rank, 0, 5)
            assert made.save_checkpoint(folder, 5).ok
            continue
        wrapper = made.model
        made = DistributedAMPTrainer(
            wrapper if own else backwards(), sgd, amp=FP16, distributed=made.distributed,
            device="cpu", **({} if own else {"comm_hook": "powersgd", **OPTIONS}),
        )  # fmt: skip
        assert made.load_checkpoint(folder).step == 5
        assert (made.wrap_model() is wrapper) == own
        advance(made, rank, 5, 6)


def squares(model, inputs):
    return model(inputs).square().mean()


@ranks(2)
def test_errors_of_powersgd_follow_the_loss_scale(rank):
    """Scales of powers of two change no bit, so any scale gives the weights of a fixed scale."""
    ends = []
    for interval in (2, 1000):
        amp = FP16.model_copy(update={"growth_interval": interval})
        torch.manual_seed(0)
        made = DistributedAMPTrainer(
            nn.Linear(6, 24).double(),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
            distributed=DistributedConfig(
                world_size=2, rank=rank, local_rank=rank, num_gpus_per_node=2
            ),
            device="cpu",
            amp=amp,
        )
        # Without an epsilon, which no scale multiplies.
        state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        made.wrap_model().register_comm_hook(state, powerSGD_hook)
        for number in range(7):
            x = torch.randn(
                8, 6, generator=torch.Generator().manual_seed(2 * number + rank)
            ).double()
            made.training_step(x, squares)
        assert not state.error_dict[0].equal(torch.zeros_like(state.error_dict[0]))
        assert made.scaler.get_scale() == (1024.0 * 8 if interval == 2 else 1024.0)
        ends.append(digest(made.module.parameters()))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"comm_hook": "fp16", "parallel": "fsdp"}, "fsdp.reduce_dtype"),
        ({"comm_hook": "powersgd", "parallel": "single"}, "use parallel=ddp, or remove comm_hook"),
        ({"comm_hook": "powerSGD"}, "use one of none, fp16, bf16, powersgd"),
        ({"comm_hook": "powersgd", "powersgd_start": 1}, "at least 2"),
    ],
)
def test_a_hook_without_ddp_is_refused(options, part):
    distributed = DistributedConfig(world_size=2, rank=0, num_gpus_per_node=2)
    with pytest.raises(ValueError, match=part) as refused:
        DistributedAMPTrainer(
            nn.Linear(2, 2), sgd, distributed=distributed, device="cpu", **options
        )
    assert len(str(refused.value).splitlines()) == 1


def test_a_module_without_ddp_has_no_error_feedback():
    made = DistributedAMPTrainer(
        nn.Linear(6, 1), lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        distributed=DistributedConfig(), device="cpu", comm_hook="powersgd",
    )  # fmt: skip
    made.wrap_model()
    ErrorFeedback(made.model).after_step(made.gate, skipped=True)
    assert not made.training_step(batches(0, 1, 0, 1)[0], loss).skipped


@forked
@pytest.mark.parametrize("hook", HOOKS)
def test_a_run_with_a_hook_survives_two_stops(tmp_path, hook):
    overrides = [
        f"train.comm_hook={hook}", "train.steps=14", "train.accumulation=2",
        *(["train.powersgd_start=2", "train.powersgd_rank=1"] if hook == "powersgd" else []),
         "amp.dtype=fp16", "amp.init_scale=1024", "amp.growth_interval=3",
    ]  # fmt: skip
    calm = play_run(tmp_path, Exact, *overrides, name="calm")
    assert calm.codes == DONE, calm.said()
    # A step has two calls of the loss, after one or two calls of the first pass.
    stopped = play_run(tmp_path, Exact, *overrides, "model.stop_at=11", name="stopped")
    assert stopped.codes == [[75] * 2, [75] * 2, [0] * 2], stopped.said()
    assert jobs.final_state(stopped.run) == jobs.final_state(calm.run)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.parallel=fsdp", "train.comm_hook=bf16"], "set fsdp.reduce_dtype=bf16"),
        (["train.parallel=single", "train.comm_hook=bf16"], "omit train.comm_hook"),
    ],
)
def test_a_config_with_a_hook_and_without_ddp_is_refused(overrides, key):
    with pytest.raises(ConfigError, match=key):
        config(*overrides)
