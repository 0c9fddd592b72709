"""The settings of torch for train.deterministic, and the message about a refused kernel."""

import contextlib
import os
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
from torch.utils.data import DataLoader, Dataset

from hpcrun.errors import NotDeterministic, UserError
from hpcrun.network.nccl.lint import lint
from hpcrun.network.nccl.rules import Setting
from hpcrun.train.determinism import (
    NCCL_ORDER,
    announce_order,
    choose_kernels,
    explain_refusals,
    fix_compiler,
)


@pytest.fixture(autouse=True)
def torch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    for name, value in NCCL_ORDER.items():
        monkeypatch.setenv(name, value)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def put() -> torch.Tensor:
    return torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))


PUT = put.__code__.co_firstlineno + 1


class Putting(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return put()


@pytest.mark.parametrize(("wanted", "fixed"), [(True, ":4096:8"), (False, None)])
def test_cublas_gets_a_fixed_workspace_unless_the_user_sets_one(wanted, fixed, monkeypatch):
    choose_kernels(wanted)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    choose_kernels(wanted)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == fixed


@pytest.mark.parametrize(
    ("wanted", "mode", "switches", "after"),
    [
        (True, "default", {"shape_padding": True}, {"shape_padding": False}),
        ("strict", "max-autotune", {"deterministic": False}, {"deterministic": True}),
        ("warn", "max-autotune", {"shape_padding": True}, {"shape_padding": True}),
        ("strict", "max-autotune-no-cudagraphs", {"shape_padding": True}, None),
    ],
)
def test_the_compiler_measures_no_kernels_or_is_refused(wanted, mode, switches, after, monkeypatch):
    options = SimpleNamespace(**switches)
    monkeypatch.setattr(torch._inductor, "config", options)
    with (
        contextlib.nullcontext()
        if after
        else pytest.raises(UserError, match=r"compile_mode: max-.* use another mode")
    ):
        fix_compiler(wanted, mode)
    assert vars(options) == (after or switches)


@pytest.mark.parametrize(
    ("wanted", "expected"), [(True, NCCL_ORDER), ("strict", NCCL_ORDER), ("warn", {}), (False, {})]
)
def test_nccl_gets_one_order_of_addition(wanted, expected, monkeypatch, capsys):
    for name in NCCL_ORDER:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    choose_kernels(wanted)
    assert {name: os.environ[name] for name in NCCL_ORDER if name in os.environ} == expected
    announce_order(wanted)
    said = capsys.readouterr().out
    assert ("train.deterministic=false switches it off" in said) is bool(expected)
    assert len(said.splitlines()) == bool(expected)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    choose_kernels(wanted)
    assert os.environ["NCCL_ALGO"] == "Tree"
    announce_order(wanted)
    told = (
        "train.deterministic: NCCL_ALGO=Tree, as set in the environment, instead of NCCL_ALGO=Ring:"
    )
    assert (told in capsys.readouterr().out) is bool(expected)


def test_the_linter_accepts_the_order_that_nccl_gets():
    settings = [Setting(name, value, "here") for name, value in NCCL_ORDER.items()]
    assert "error" not in {finding.level for finding in lint(settings)}


@pytest.mark.parametrize(
    ("wanted", "mode"),
    [(True, "error"), ("strict", "error"), ("warn", "warn"), (False, "default")],
)
def test_torch_refuses_warns_or_accepts_and_does_not_fill_memory(wanted, mode):
    choose_kernels(wanted)
    assert torch.get_deterministic_debug_mode() == ["default", "warn", "error"].index(mode)
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_a_refused_kernel_is_named_with_its_line():
    choose_kernels(True)
    with pytest.raises(NotDeterministic) as told, explain_refusals():
        put()
    assert f" of put_, called at {__file__}:{PUT}; use another operation, or " in str(told.value)


def test_a_refusal_in_a_loader_process_is_reported_too():
    choose_kernels(True)
    place = f"of put_, called at {re.escape(__file__)}:{PUT};"
    with pytest.raises(NotDeterministic, match=place), explain_refusals():
        list(DataLoader(Putting(), num_workers=1))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        # torch.compile of torch 2.13.
        (
            "RuntimeError when making fake tensor call\n  Explanation: Dynamo failed to run FX node "
            "with fake tensors: call_function <function max_unpool2d at 0x7f>(*(2), **{}): got RuntimeError("
            '"max_unpooling2d_forward_out does not have a deterministic implementation, but you set '
            "'torch.use_deterministic_algorithms(True)'.\n\nfrom user code:\n"
            '   File "/home/me/model.py", line 4, in forward\n    y = F.max_unpool2d(y, i, 2)\n',
            "torch has no deterministic implementation of max_unpooling2d_forward_out, called at "
            "/home/me/model.py:4; ",
        ),
        (
            "median CUDA with indices output does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'.",
            "torch has no deterministic implementation of median CUDA with indices output, called at",
        ),
    ],
)
def test_torchs_message_is_recognized_in_any_wrapper(said, told):
    with (
        pytest.raises(NotDeterministic, match=f"^train.deterministic: {re.escape(told)}") as raised,
        explain_refusals(),
    ):
        raise RuntimeError(said)
    assert "\n" not in str(raised.value)
