"""Layers in fp8: which layers, what stays, and what is refused. torchao emulates them on the CPU."""

import copy
import sys

import pytest
import torch
from torch import nn

from hpcrun.config import AMPConfig
from hpcrun.devices import accelerator, vendor
from hpcrun.errors import NotTrainable, UserError
from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.options import LanguageModelShape
from hpcrun.train.model.prepare import Preparation, explain_sizes, to_float8
from hpcrun.train.step import precision
from hpcrun.train.step.trainer import DistributedAMPTrainer


class Scaled(nn.Linear):
    """A layer with a forward pass of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        block = nn.ModuleDict(
            {
                "wide": nn.Linear(32, 48),
                "back": nn.Linear(48, 32),
                "odd": nn.Linear(32, 7),
                "own": Scaled(32, 32),
            }
        )
        self.layers = nn.ModuleList([block, copy.deepcopy(block)])
        self.head = nn.Linear(32, 64)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["back"](layer["wide"](x).relu())
        return self.head(x)


def test_layers_of_blocks_become_fp8_and_keep_their_weights():
    pytest.importorskip("torchao")
    net, plain = Net(), Net()
    wide, before = net.layers[0]["wide"], dict(net.named_parameters())
    seen = []
    wide.register_forward_hook(lambda *_: seen.append(1))
    names = to_float8(net, "emulate")
    assert names == [f"layers.{i}.{name}" for i in (0, 1) for name in ("wide", "back")]
    assert net.layers[0]["wide"] is wide
    assert type(wide).__name__ == "Float8Linear"
    assert {name: id(value) for name, value in net.named_parameters()} == {
        name: id(value) for name, value in before.items()
    }
    x = torch.randn(16, 32)
    exact, rounded = plain(x), net(x)
    assert seen == [1]
    assert not torch.equal(exact, rounded)
    # e4m3 has three bits after the point.
    assert (exact - rounded).norm() < 0.05 * exact.norm()
    rounded.square().sum().backward()
    assert all(p.grad is not None for p in wide.parameters())


def test_a_model_with_layers_in_fp8_learns_as_in_bf16():
    pytest.importorskip("torchao")
    text = torch.randint(0, 20, (4, 17), generator=torch.Generator().manual_seed(0))
    ends = []
    for float8 in (False, "emulate"):
        trainer = DistributedAMPTrainer(
            GPT(LanguageModelShape(layers=1, width=32, heads=2, context=16, dropout=0.0)),
            lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
            amp=AMPConfig(dtype="bf16"),
            preparation=Preparation(float8=float8),
        )
        trainer.wrap_model()
        losses = [float(trainer.training_step([text], likelihood).loss) for _ in range(12)]
        assert losses[-1] < 0.6 * losses[0]
        ends.append(losses[-1])
    assert ends[0] != ends[1]
    assert ends[1] == pytest.approx(ends[0], rel=0.02)


def likelihood(model, text):
    scores = model(text[:, :-1]).float()
    return nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def test_a_number_of_tokens_that_no_kernel_takes_is_explained():
    pytest.importorskip("torchao")
    # On the meta device, torch checks the sizes as on a GPU.
    net = Net().to("meta", torch.bfloat16)
    to_float8(net, True)
    rows = torch.empty(8, 197, 32, device="meta", dtype=torch.bfloat16)
    with explain_sizes(True):
        net(rows[:, :196]).sum().backward()
    refused = r"train.float8: .* multiple of 16 \(.*1576.*\); change train.batch_size"
    with pytest.raises(NotTrainable, match=refused), explain_sizes(True):
        net(rows).sum().backward()
    with pytest.raises(RuntimeError, match=r"^divisible by 16$"), explain_sizes(False):
        raise RuntimeError("divisible by 16")


def test_a_model_without_fp8_layers_or_torchao_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"train\.float8: Linear has no nn\.Linear with sizes"):
        to_float8(nn.Linear(32, 32), "emulate")
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(
        UserError, match=r"needs the package torchao: `pip install hpcrun\[float8\]`"
    ):
        to_float8(Net(), "emulate")


@pytest.mark.parametrize(
    ("hip", "capability", "has"),
    [
        (None, (9, 0), True),
        (None, (8, 9), True),
        (None, (8, 6), False),
        ("6.2", (9, 0), False),
        ("6.2", (9, 4), True),
        ("7.0", (11, 0), False),
    ],
)
def test_a_gpu_without_fp8_is_refused(monkeypatch, hip, capability, has):
    monkeypatch.setattr(vendor.torch.version, "hip", hip)
    monkeypatch.setattr(vendor.torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(accelerator, "name", lambda _: "GPU")
    if has:
        precision.require_float8(torch.device("cuda"))
        return
    with pytest.raises(UserError, match=r"^train\.float8: GPU has no matrix products in fp8"):
        precision.require_float8(torch.device("cuda"))
