"""Tests that fail on ranks in different ways, for ``test_failing_on_ranks.py``."""

import os
import time

import pytest
import torch

from tests.support.on_ranks import gathered, ranks


@ranks(3)
def test_an_assertion_of_one_rank(rank):
    print(f"rank {rank} was here")
    if rank == 1:
        assert {"step": rank, "loss": 2.5} == {"step": 7, "loss": 2.5}
    gathered(rank)


@ranks(2, limit=8)
def test_a_rank_that_waits(rank):
    if rank == 1:
        time.sleep(1000)
    gathered(rank)


@ranks(2)
def test_a_collective_that_nccl_refuses(rank):
    torch.distributed.all_reduce(torch.ones(2, 3).T)


@ranks(2, 1)
def test_a_test_that_passes(rank, world_size, phase, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ONLY_HERE", "1")
    print("captured")
    assert capsys.readouterr().out == "captured\n"
    assert world_size == 2 - phase
    (tmp_path / f"{phase}-{rank}").touch()
    gathered(rank)
    assert len(list(tmp_path.iterdir())) == 2 + phase


@ranks(2)
def test_a_test_that_every_rank_skips(rank):
    assert "ONLY_HERE" not in os.environ
    pytest.skip("a reason")
