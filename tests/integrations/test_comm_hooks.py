"""A loop whose DDP has a communication hook with a state resumes with the same bits, or is refused."""

import contextlib
import functools
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hpcrun
from hpcrun.storage.errors import CheckpointError
from tests.integrations.loops import digest
from tests.support.on_ranks import ranks


class Net(nn.Module):
    """A network whose gradients are ready in another order than declared."""

    def __init__(self):
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(32, 1), nn.Linear(8, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.last(self.middle(self.first(x).tanh()).tanh()).squeeze(1)


def sent(buffer):
    """Average a buffer over the ranks."""
    future = dist.all_reduce(buffer.div_(dist.get_world_size()), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def rest_of(errors, bucket):
    """Return what was not sent of a bucket; DDP changes its buckets after the first step."""
    rest = errors.get(bucket.index())
    return 0.0 if rest is None or rest.shape != bucket.buffer().shape else rest


def quantized(errors, bucket):
    """Send a coarse form of a bucket, and keep the rest in ``errors`` for the next step."""
    whole = bucket.buffer() + rest_of(errors, bucket)
    coarse = (whole * 64).round() / 64
    errors[bucket.index()] = whole - coarse
    return sent(bucket.buffer().copy_(coarse))


class Quantizer:
    """The same as an object with ``state_dict()``, whose method is the hook."""

    def __init__(self):
        self.errors, self.lock = {}, object()

    def state_dict(self):
        return {"errors": self.errors}

    def load_state_dict(self, state):
        self.errors = state["errors"]

    def hook(self, _, bucket):
        return quantized(self.errors, bucket)


class Noise:
    """A plain object: counts, has a generator, and belongs to a group."""

    def __init__(self):
        self.calls, self.group = 0, dist.group.WORLD
        self.errors = defaultdict(float)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def __call__(self, scale, bucket):
        self.calls += 1
        draw = torch.rand((), generator=self.generator) + self.calls
        whole = bucket.buffer() + rest_of(self.errors, bucket)
        self.errors[bucket.index()] = whole * scale[0] * 0.01
        scale[0] *= 0.9
        return sent(bucket.buffer().copy_(whole * draw))


GLOBAL = {}


def from_global(_, bucket):
    return quantized(GLOBAL, bucket)


def from_closure():
    errors, count = {}, 0

    def hook(_, bucket):
        nonlocal count
        count += 1
        bucket.buffer().mul_(1 + count / 64)
        return quantized(errors, bucket)

    return hook


def partly(errors, state, bucket):
    return quantized(errors, bucket)


def bf16_on_cpu(group, bucket):
    """Send as torch's hook, which DDP refuses without NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


def powersgd(**options):
    return powerSGD_hook.PowerSGDState(
        None, start_powerSGD_iter=2, min_compression_rate=1, **options
    )


def everyone(**options):
    return post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, 3, **options)


# Each gives a new state and hook.
HOOKS = {
    "powersgd": lambda: (powersgd(matrix_approximation_rank=2), powerSGD_hook.powerSGD_hook),
    "wrapped": lambda: (
        powersgd(warm_start=False),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "post-local": lambda: (everyone(), post_localSGD_hook.post_localSGD_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, bf16_on_cpu),
    "dict": lambda: ({}, quantized),
    "method": lambda: (None, Quantizer().hook),
    "object": lambda: ([1.0], Noise().__call__),
    "closure": lambda: (None, from_closure()),
    "wrapped-closure": lambda: (None, default_hooks.fp16_compress_wrapper(from_closure())),
    "global": lambda: (GLOBAL.clear(), from_global),
    "partial": lambda: (None, functools.update_wrapper(functools.partial(partly, {}), partly)),
}

SAME_AS_DICT = ("method", "global", "partial")


def model_with(hook):
    torch.manual_seed(1)
    # PowerSGD starts collectives in gloo's threads, so the order of those of several buckets is not fixed.
    one = hook is not None and isinstance(hook[0], powerSGD_hook.PowerSGDState)
    model = DistributedDataParallel(Net(), bucket_cap_mb=25 if one else 0.004)
    if hook is not None:
        model.register_comm_hook(*hook)
    return model


def train(folder, hook, most=None, several=False):
    """Train three epochs of four steps, or to the step ``most``; return a hash of the weights."""
    model, other = model_with(hook()), DistributedDataParallel(nn.Linear(8, 1))
    models = {"a": model, "b": other} if several else model
    weights = [*model.parameters(), *other.parameters()] if several else model.parameters()
    optimizer = torch.optim.SGD(weights, lr=0.02)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sin().sum(1))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    state = hpcrun.resumable(
        model=models, optimizer=optimizer, loader=loader, folder=folder, every=100
    )
    for _ in state.epochs(3, max_steps=most):
        for inputs, target in state.batches(loader):
            optimizer.zero_grad()
            output = model(inputs) + (other(inputs).squeeze(1) if several else 0.0)
            (output - target).square().mean().backward()
            optimizer.step()
            state.step()
    return digest(model)


# CI runs three of the hooks, with a loss scale.
@pytest.mark.slow
@ranks(2, 2, 2)
def test_two_interruptions_change_no_bit_with_any_hook(tmp_path, phase):
    ends = {}
    for name, hook in HOOKS.items():
        end = train(tmp_path / name, hook, (5, 9, None)[phase])
        if phase == 2:
            same = name in SAME_AS_DICT
            whole = ends["dict"][1] if same else train(tmp_path / f"whole-{name}", hook)
            ends[name] = (end, whole)
    several = train(tmp_path / "several", HOOKS["powersgd"], (5, 9, None)[phase], several=True)
    if phase == 2:
        ends["several"] = (several, train(tmp_path / "4", HOOKS["powersgd"], several=True))
        assert {name for name, (cut, whole) in ends.items() if cut != whole} == set()
        assert len({whole for _, whole in ends.values()}) == len(HOOKS) - 2


def train_scaled(folder, hook, most=None):
    """Train as :func:`train`, in steps of two batches with a loss scale; return a hash of the weights."""
    model = model_with(hook())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sin().sum(1))
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    state = hpcrun.resumable(
        model=model, optimizer=optimizer, scaler=scaler, loader=loader, folder=folder, every=100
    )
    for _ in state.epochs(3, max_steps=most):
        for number, (inputs, target) in enumerate(state.batches(loader)):
            last = number % 2 == 1
            with contextlib.nullcontext() if last else model.no_sync():
                value = (model(inputs) - target).square().mean() / 2
                scaler.scale(value).backward()
            if last:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                state.step()
    return digest(model)


@ranks(2, 2, 2)
def test_two_interruptions_change_no_bit_with_a_loss_scale(tmp_path, phase):
    ends = set()
    for name in ("fp16", "bf16", "powersgd"):
        cut = train_scaled(tmp_path / name, HOOKS[name], (5, 9, None)[phase])
        if phase == 2:
            assert cut == train_scaled(tmp_path / f"whole-{name}", HOOKS[name]), name
            ends.add(cut)
    assert len(ends) == (3 if phase == 2 else 0)


def refusals(model):
    """Yield hooks that no checkpoint can hold, and a part of the line that refuses them."""
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def stepping(_, bucket):
        return sent(bucket.buffer())

    stepping.__module__ = "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook"
    alone = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 3)
    yield (None, stepping), "steps an optimizer in the backward pass"
    yield (alone, post_localSGD_hook.post_localSGD_hook), "within 1 of 2 ranks"
    yield (object(), lambda _, bucket: sent(bucket.buffer())), "its state is a builtins.object"
    yield ({"lock": object()}, quantized), "its state['lock'] is a builtins.object"
    yield ({model: 1}, quantized), "has a key of type DistributedDataParallel"
    yield (
        (None, functools.update_wrapper(functools.partial(partly, zero), partly)),
        "is a ZeroRedundancyOptimizer",
    )


@ranks(2)
def test_a_hook_that_no_checkpoint_can_hold_is_refused(tmp_path):
    for number in range(6):
        model = model_with(None)
        hook, part = list(refusals(model))[number]
        model.register_comm_hook(*hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(CheckpointError, match="communication hook") as refused:
            hpcrun.resumable(model=model, optimizer=optimizer, folder=tmp_path / str(number))
        assert part in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1
        assert not (tmp_path / str(number)).exists()


@ranks(2, 2, 1)
def test_a_resume_with_another_hook_is_refused(tmp_path, phase, capfd):
    if phase == 0:
        train(tmp_path / "powersgd", HOOKS["powersgd"], 5)
        train(tmp_path / "fp16", HOOKS["fp16"], 5)
        return
    if phase == 2:
        # The state of a hook is of one rank.
        model = model_with(HOOKS["powersgd"]())
        saver = hpcrun.Checkpointer(
            tmp_path / "powersgd",
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.02),
        )
        assert saver.restore() == 5
        (note,) = [note for note in saver.notes if "powerSGD_hook starts without its state" in note]
        assert "this number of ranks" in note
        return
    for other, part in (
        (lambda: None, "powerSGD_hook, and this training has none; register the same hook"),
        (HOOKS["fp16"], "powerSGD_hook, and this training has fp16_compress_hook"),
        (
            lambda: (powersgd(), powerSGD_hook.powerSGD_hook),
            "approximation_rank is 2 in the checkp",
        ),
    ):
        with pytest.raises(CheckpointError, match=part):
            train(tmp_path / "powersgd", other)
    train(tmp_path / "fp16", lambda: None, 7)
    if dist.get_rank() == 0:
        assert "were sent by the communication hook fp16_compress_hook" in capfd.readouterr().err
