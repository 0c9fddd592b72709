"""The environment that a checkpoint records, and what a resume says about another environment."""

import pytest
import torch

from hpcrun.config import override_layer, parallelism, resolve
from hpcrun.errors import NotSameBits
from hpcrun.ranks.collective import Ranks
from hpcrun.train import determinism as drift

HERE = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "ranks": "8"}


def test_the_environment_of_a_rank_on_the_cpu(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    found = drift.environment(torch.device("cpu"), Ranks())
    assert found["torch"] == torch.__version__
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    assert found["threads"] == str(torch.get_num_threads())
    assert (found["ranks"], found["MKL_CBWR"]) == ("1", "AVX2")
    assert found["DNNL_MAX_CPU_ISA"] == "none"
    assert not {"NCCL_ALGO", "ranks_per_node", "cuda"} & found.keys()
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


def test_what_decides_bits_is_compared():
    before = {**HERE, "NCCL_ALGO": "none", "NCCL_PROTO": "Simple", "NCCL_MAX_CTAS": "none"}
    now = {**HERE, "device": "NVIDIA A100-SXM4-80GB", "NCCL_ALGO": "Ring"}
    assert drift.changed({"environment": before}, now) == [
        "NCCL_ALGO: none -> Ring",
        "NCCL_PROTO: Simple -> none",
        "device: NVIDIA H100 80GB HBM3 -> NVIDIA A100-SXM4-80GB",
    ]
    assert drift.changed({"environment": HERE}, {**HERE, "nccl": "2.27.3"}) == []


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
    assert parallelism(strict) == parallelism(true)
    assert parallelism(strict) != parallelism(warn)
