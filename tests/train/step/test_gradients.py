"""Two real ranks with bad gradients."""

import hashlib
import itertools

import pytest
import torch
import torch.distributed as dist

from hpcrun.config import AMPConfig, override_layer, resolve
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.train.health.nonfinite import NonFiniteWatch
from hpcrun.train.step.gate import StepGate
from hpcrun.train.step.trainer import DistributedAMPTrainer
from tests.support.journal import read_events
from tests.support.on_ranks import agreed, ranks
from tests.support.training.parallelism import Net
from tests.support.training.small_training import loss

FP16 = AMPConfig(dtype="fp16", init_scale=1024.0, growth_interval=3)


LATE_ON = {"at once": frozenset({"cuda"}), "late": frozenset({"cpu"})}
"""Devices on which the decision of a step is read in the next step."""


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def trainer(rank, parallel="ddp", **options):
    torch.manual_seed(0)
    made = DistributedAMPTrainer(
        Net(),
        fused_adamw,
        distributed=DistributedConfig(
            world_size=2, rank=rank, local_rank=rank, num_gpus_per_node=2
        ),
        device="cpu",
        parallel=parallel,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.9**s),
        **options,
    )
    made.wrap_model()
    return made


def batches(rank, count):
    """Return ``count`` batches of eight samples, different on each rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(count):
        inputs = torch.randn(8, 6, generator=generator)
        yield inputs, inputs.sin().sum(1)


def spoiled(model, batch):
    """A loss that is NaN on rank 1."""
    return loss(model, batch) * (torch.nan if dist.get_rank() == 1 else 1.0)


def overflowing(model, batch):
    """Make a row of a layer's gradient infinite on rank 1; under FSDP a single rank holds this row."""
    layer = model.module.enter if hasattr(model, "module") else model.enter

    def one_is_infinite(gradient):
        spike = torch.zeros_like(gradient)
        spike[0, 0] = torch.inf
        return gradient + spike

    def spoil(_, inputs, output):
        if dist.get_rank() == 1:
            output.register_hook(one_is_infinite)

    hook = layer.register_forward_hook(spoil)
    value = loss(model, batch)
    hook.remove()
    return value


def digest(made):
    """Return this rank's part of the weights and of the optimizer state."""
    state = made.optimizer.state_dict()["state"]
    tensors = [*made.module.parameters(), *(v for s in state.values() for v in s.values())]
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    joined = b"".join(t.detach().contiguous().numpy().tobytes() for t in local)
    return hashlib.sha256(joined).hexdigest()


@pytest.mark.parametrize(
    ("bad", "amp"),
    [
        pytest.param(spoiled, AMPConfig(), id="nan"),
        pytest.param(overflowing, AMPConfig(), id="overflow"),
        pytest.param(overflowing, FP16, id="overflow-fp16"),
    ],
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@ranks(2)
def test_a_bad_gradient_of_one_rank_skips_all(rank, monkeypatch, parallel, bad, amp):
    ends = {}
    for (read, late_on), clip in itertools.product(LATE_ON.items(), (None, 0.5)):
        monkeypatch.setattr(StepGate, "late_on", late_on)
        made = trainer(rank, parallel, amp=amp, clip_norm=clip)
        first, second, *others = batches(rank, 5)
        made.training_step(first, loss)
        before = digest(made)
        assert made.training_step(second, bad).skipped
        assert digest(made) == before, "a weight or a moment moved"
        rates = [made.training_step(step, loss).learning_rate for step in others]
        # The skipped step had the rate 0.009.
        assert rates == pytest.approx([0.009, 0.0081, 0.00729], abs=1e-6)
        made.gate.resolve_pending()
        assert (made.gate.skipped, made.gate.steps) == (1, 5)
        assert all(p.isfinite().all() for p in made.module.parameters())
        # The scale is halved at the second of five steps, and doubled after three good steps.
        assert made.scaler.get_scale() == (1024.0 if amp is FP16 else 1.0)
        ends[read, clip] = digest(made)
        if parallel == "ddp":
            agreed(ends[read, clip])
    for clip in (None, 0.5):
        # A decision that is read one step later changes no bits.
        assert ends["late", clip] == ends["at once", clip]


@pytest.mark.parametrize("read", LATE_ON)
@ranks(2)
def test_a_nan_loss_of_one_rank_is_no_overflow(rank, tmp_path, monkeypatch, read):
    """Give an overflow, and later a NaN loss on rank 1, under fp16."""
    monkeypatch.setattr(StepGate, "late_on", LATE_ON[read])
    config = resolve([override_layer(["amp.dtype=fp16"])])
    made = trainer(rank, amp=FP16)
    watch = NonFiniteWatch(
        RunDirectory(tmp_path), Attempt("7", 0), config, made, start=0,
        ranks=made.control_ranks(), samples=None,
    )  # fmt: skip

    for number, step in enumerate(batches(rank, 4)):
        bad = {1: overflowing, 3: spoiled}.get(number, loss)
        watch.check(made.training_step(step, bad))
    watch.finish()
    dist.barrier()  # Rank 0 writes, but rank 1 would not wait.
    assert [event.step for event in read_events(RunDirectory(tmp_path))] == [3]
