"""The environment that a checkpoint records, and what a resume says about another environment."""

import pytest
import torch

from hpcrun.config import override_layer, resolve, ways
from hpcrun.errors import NotSameBits
from hpcrun.ranks.collective import Ranks
from hpcrun.train import drift

HERE = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "driver": "550.54.15", "ranks": "8"}


def test_the_environment_of_a_rank_on_the_cpu(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    found = drift.environment(torch.device("cpu"), Ranks())
    assert found["torch"] == torch.__version__
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["threads"] == str(torch.get_num_threads())
    assert (found["ranks"], found["MKL_CBWR"]) == ("1", "AVX2")
    assert found["DNNL_MAX_CPU_ISA"] == "none"
    assert not {"NCCL_ALGO", "ranks_per_node", "cuda", "driver"} & found.keys()
    given = {"NCCL_ALGO": "Tree", "NCCL_PROTO": ""}
    assert drift.variables(given, ("NCCL_ALGO", "NCCL_MAX_CTAS", "NCCL_PROTO")) == {
        "NCCL_ALGO": "Tree",
        "NCCL_MAX_CTAS": "none",
        "NCCL_PROTO": "none",
    }


def test_ranks_with_different_devices_are_counted():
    ranks = [
        ("a", {"device": "H100"}),
        ("a", {"device": "H100"}),
        ("b", {"device": "A100", "NCCL_ALGO": "Ring"}),
    ]
    assert drift.of_ranks(ranks, gpus=True) == {
        "NCCL_ALGO": "Ring x 1, none x 2",
        "device": "A100 x 1, H100 x 2",
        "ranks": "3",
        "ranks_per_node": "1 x 1, 2 x 1",
    }
    assert drift.of_ranks(ranks[:2], gpus=True)["ranks_per_node"] == "2"


def test_what_decides_bits_is_compared_and_the_driver_is_not():
    before = {**HERE, "NCCL_ALGO": "none", "NCCL_PROTO": "Simple", "NCCL_MAX_CTAS": "none"}
    now = {**HERE, "device": "NVIDIA A100-SXM4-80GB", "driver": "560.28.03", "NCCL_ALGO": "Ring"}
    assert drift.changed({"environment": before}, now) == [
        "NCCL_ALGO: none -> Ring",
        "NCCL_PROTO: Simple -> none",
        "device: NVIDIA H100 80GB HBM3 -> NVIDIA A100-SXM4-80GB",
    ]
    assert drift.changed({"environment": HERE}, dict(HERE)) == []


def test_what_an_earlier_version_did_not_record_is_named_but_refuses_no_resume():
    now = {**HERE, "NCCL_ALGO": "Ring", "NCCL_PROTO": "none", "nccl": "2.27.3"}
    earlier = {"environment": {"device": HERE["device"], "torch": "2.12.0", "ranks": "8"}}
    assert drift.changed(earlier, now) == ["torch: 2.12.0 -> 2.13.0"]
    assert drift.unrecorded(earlier, now) == ["NCCL_ALGO", "nccl"]
    assert drift.unrecorded({"environment": now}, now) == []
    first = {"torch": "2.12.0"}
    assert drift.changed(first, HERE) == ["torch: 2.12.0 -> 2.13.0"]
    assert drift.unrecorded(first, HERE) == ["device", "ranks"]
    assert drift.changed({}, HERE) == []


def test_strict_names_the_changes_and_the_remedy():
    drift.require_same([], 5)
    told = r"^train\.deterministic=strict: different from when step 5 was saved: a: 1 -> 2; "
    with pytest.raises(NotSameBits, match=told):
        drift.require_same(["a: 1 -> 2"], 5)


def test_strict_and_true_are_the_same_way_to_compute():
    strict, true, warn = (
        resolve([override_layer([f"train.deterministic={value}"])])
        for value in ("strict", "true", "warn")
    )
    assert ways(strict) == ways(true)
    assert ways(strict) != ways(warn)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
            "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs)\n"
            "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n",
            "570.86.15",
        ),
        ("something else\n", None),
    ],
)
def test_the_driver_is_read_from_the_kernel_module(tmp_path, text, version):
    nvidia, amd = tmp_path / "nvidia", tmp_path / "amd"
    assert drift.driver(nvidia, amd) is None
    amd.write_text("6.10.5\n")
    assert drift.driver(nvidia, amd) == "6.10.5"
    nvidia.write_text(text)
    assert drift.driver(nvidia, amd) == version
