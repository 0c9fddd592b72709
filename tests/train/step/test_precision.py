"""Skipped steps, gradients that are not finite, the loss scale and its history, on one device."""

import copy
import os

import pytest
import torch
from torch import nn

from hpcrun.config import AMPConfig
from hpcrun.devices import accelerator, vendor
from hpcrun.train.step import precision
from hpcrun.train.step.gate import StepGate, not_finite
from hpcrun.train.step.trainer import AMPTrainer

FP16 = AMPConfig(dtype="fp16", init_scale=1024.0, growth_interval=3)


def loss(model, batch):
    inputs, factor = batch
    return (model(inputs).float() * factor).square().mean()


def batches(count, *bad):
    """Take ``count`` batches, each of one step, with an infinite loss at the steps ``bad``."""
    generator = torch.Generator().manual_seed(3)
    for step in range(count):
        factor = torch.inf if step in bad else 1.0
        yield torch.randn(4, 6, generator=generator), torch.full((4, 1), factor)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, fused=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def make(optimizer=adamw, **options):
    torch.manual_seed(0)
    return AMPTrainer(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
        optimizer,
        scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.9**step),
        device="cpu",
        ema=0.8,
        **options,
    )


def everything(trainer):
    """Return weights, averages, moments, rates, schedule and scale: everything that a step may change."""
    return copy.deepcopy(
        [
            trainer.module.state_dict() | trainer.average.tensors(),
            trainer.optimizer.state_dict(),
            trainer.scheduler.state_dict(),
            trainer.gate.state_dict(),
        ]
    )


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture
def late(monkeypatch):
    """Act like a GPU: the fused optimizer gets the decision on the device, the host a step later."""
    monkeypatch.setattr(StepGate, "late_on", frozenset({"cpu"}))


@pytest.mark.parametrize("amp", [AMPConfig(), AMPConfig(dtype="bf16"), FP16])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", [adamw, plain_sgd])
def test_a_step_that_is_not_finite_changes_nothing(amp, clip, optimizer):
    trainer = make(optimizer, amp=amp, clip_norm=clip)
    good, bad = batches(2, 1)
    trainer.training_step(good, loss)
    before = everything(trainer)
    result = trainer.training_step(bad, loss)
    after = everything(trainer)
    assert result.skipped
    assert same(before[:3], after[:3])
    assert (trainer.gate.steps, trainer.gate.skipped, trainer.gate.skipped_in_row) == (2, 1, 1)
    assert not trainer.training_step(good, loss).skipped
    assert (trainer.gate.skipped, trainer.gate.skipped_in_row) == (1, 0)


class Library(torch.optim.SGD):
    """A fused optimizer of another library: it claims to know the decision, and does not read it."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self._step_supports_amp_scaling = True


class Obeying(torch.optim.AdamW):
    """A user's subclass of a fused optimizer of torch."""


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("amp", [AMPConfig(), AMPConfig(dtype="bf16"), FP16])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: Library(model.parameters()),
        lambda model: Obeying(model.parameters(), lr=0.1, fused=True),
    ],
    ids=["library", "subclass"],
)
def test_a_foreign_optimizer_takes_no_nonfinite_step(amp, clip, optimizer):
    trainer = make(optimizer, amp=amp, clip_norm=clip)
    good, bad = batches(2, 1)
    trainer.training_step(good, loss)
    before = everything(trainer)
    result = trainer.training_step(bad, loss)
    assert not trainer.gate.pending
    assert result.skipped
    assert same(before[:3], everything(trainer)[:3])


@pytest.mark.parametrize("amp", [AMPConfig(), FP16])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("optimizer", [adamw, sgd, plain_sgd])
def test_a_decision_one_step_later_changes_no_bit(monkeypatch, amp, clip, optimizer):
    def train():
        trainer = make(optimizer, amp=amp, clip_norm=clip)
        return trainer, [trainer.training_step(step, loss) for step in batches(9, 0, 3, 4, 8)]

    prompt, results = train()
    monkeypatch.setattr(StepGate, "late_on", frozenset({"cpu"}))
    other, later = train()
    assert [it.learning_rate for it in results] == [it.learning_rate for it in later]
    assert [it.skipped for it in results] == [it.skipped for it in later]
    assert [step for step, it in enumerate(later) if it.skipped] == [0, 3, 4, 8]
    assert same(everything(prompt), everything(other))


def test_a_group_with_a_nonfinite_first_gradient_keeps_no_momentum(monkeypatch):
    def train():
        torch.manual_seed(0)
        parts = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        groups = [{"params": part.parameters()} for part in parts]
        trainer = AMPTrainer(
            parts, torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True), device="cpu"
        )

        def of_two_parts(model, batch):
            parts_used, factor = batch
            values = torch.ones(4, 64)
            for part in model[:parts_used]:
                values = part(values)
            return (values * factor).square().mean()

        # Memory that the momentum may get holds other numbers than zero.
        dirty = [torch.full((64, 64), 7.0) for _ in range(50)]
        for step in ((1, 1.0), (2, torch.inf), (2, 1.0)):
            del dirty[:10]
            trainer.training_step(step, of_two_parts)
        return trainer.module.state_dict()

    prompt = train()
    monkeypatch.setattr(StepGate, "late_on", frozenset({"cpu"}))
    assert same(dict(prompt), dict(train()))


@pytest.mark.usefixtures("late")
def test_a_checkpoint_waits_for_the_decision(tmp_path):
    calm, first = make(amp=FP16), make(amp=FP16)
    steps = list(batches(8, 2, 3, 6))
    for step in steps:
        calm.training_step(step, loss)
    for step in steps[:4]:
        first.training_step(step, loss)
    assert first.gate.pending
    assert first.save_checkpoint(tmp_path, 4).ok
    again = make(amp=FP16)
    again.load_checkpoint(tmp_path)
    assert again.gate.skipped_in_row == 2
    for step in steps[4:]:
        again.training_step(step, loss)
    assert same(everything(calm), everything(again))


def test_a_checkpoint_resumes_with_another_precision(tmp_path):
    bf16 = make(amp=AMPConfig(dtype="bf16"))
    (step,) = batches(1)
    bf16.training_step(step, loss)
    bf16.save_checkpoint(tmp_path, 1)
    fp16 = make(amp=FP16)
    fp16.load_checkpoint(tmp_path)
    assert (fp16.scaler.get_scale(), fp16.gate.steps) == (1024.0, 1)
    assert not fp16.training_step(step, loss).skipped


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_every_kind_of_gradient_is_checked(value):
    parameters = [
        nn.Parameter(torch.zeros(3, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
    ]
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    optimizer = torch.optim.SGD([*parameters, table.weight, nn.Parameter(torch.zeros(2))], lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    kept = [parameter.grad.clone() for parameter in parameters]
    assert not not_finite(optimizer)
    assert all(map(torch.equal, kept, [parameter.grad for parameter in parameters]))
    for parameter in parameters:
        parameter.grad[1] = value
        assert not_finite(optimizer) == 1.0
        parameter.grad[1] = 1.0
    table.weight.grad._values()[0] = value
    assert not_finite(optimizer) == 1.0


@pytest.mark.parametrize(("dtype", "allowed"), [("fp32", False), ("tf32", True), ("bf16", True)])
def test_fp32_is_fp32_for_convolutions_too(monkeypatch, dtype, allowed):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    precision.choose_matmul(AMPConfig(dtype=dtype), torch.device("cuda"))
    assert torch.backends.cudnn.allow_tf32 is allowed


def test_tf32_sets_the_variable_that_torch_wants_on_amd(monkeypatch):
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    name = "HIPBLASLT_ALLOW_TF32"
    for hip, given, wanted in (("6.4", None, "1"), ("6.4", "0", "0"), (None, None, None)):
        monkeypatch.setattr(torch.version, "hip", hip)
        # Set first, so that the end of the test removes the value of the code.
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
        precision.choose_matmul(AMPConfig(dtype="tf32"), torch.device("cuda"))
        assert os.environ.get(name) == wanted


def test_a_gpu_with_bf16_in_fp32_gets_a_hint(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(vendor.torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(accelerator, "name", lambda _: "NVIDIA H100 80GB HBM3")
    told = precision.faster(AMPConfig(), gpu)
    assert told.startswith(
        "amp.dtype=fp32: NVIDIA H100 80GB HBM3 computes many times faster in bf16; "
    )
    assert precision.faster(AMPConfig(dtype="tf32"), gpu) is None
    assert precision.faster(AMPConfig(), torch.device("cpu")) is None
    monkeypatch.setattr(vendor.torch.cuda, "get_device_capability", lambda _: (7, 0))
    assert precision.faster(AMPConfig(), gpu) is None
