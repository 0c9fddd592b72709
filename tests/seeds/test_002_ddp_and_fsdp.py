"""002: task for DDP and FSDP. docs/seeds.md lists its statements."""

import os
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hpcrun
from hpcrun.errors import UserError
from tests.seeds.playing import PROGRAMS, loss_of, output, play, start
from tests.support import jobs
from tests.support.on_ranks import agreed, forked, gathered, ranks
from tests.support.ports import free_port
from tests.support.training.forks import fork_ranks

TRAIN = str(PROGRAMS / "train.py")
TORCHRUN = ("-m", "torch.distributed.run")
"""The program that the command ``torchrun`` starts."""


# The plan of tests: each way of training ends at the loss of a single process.


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return the final loss of one process."""
    folder = tmp_path_factory.mktemp("single")
    text = output(start(folder, TRAIN, "--dataset_name", "wikitext"))
    first = float(next(line for line in text.splitlines() if "step 0:" in line).split()[-1])
    assert loss_of(text) < 0.5 * first
    assert "rank 0 of 1 on" in text
    return loss_of(text)


def same(loss):
    return pytest.approx(loss, rel=1e-4)


SHARES = {
    "ddp": (2, "--use_ddp", "--batch_size", "16"),
    "accumulation": (
        *(2, "--use_ddp", "--batch_size", "4", "--gradient_accumulation_steps", "4"),
        *("--grad_clip", "1.0"),
    ),
    "fsdp": (2, "--use_fsdp", "--batch_size", "16"),
    "compile": (2, "--use_ddp", "--batch_size", "16", "--compile"),
    "four ranks": (4, "--distributed", "--use_ddp", "--batch_size", "8"),
}


@pytest.mark.parametrize("way", SHARES)
@forked
def test_a_way_of_training_ends_at_the_same_loss(single, tmp_path, way):
    world_size, *words = SHARES[way]
    first, *others = play("train.py", tmp_path, world_size, *words)
    assert loss_of(first) == same(single)
    assert "effective batch 32\n" in first
    assert not [text for text in others if "loss" in text]


@forked
def test_a_resumed_training_ends_at_the_same_loss(single, tmp_path):
    words = ("--use_ddp", "--batch_size", "16", "--checkpoint", "checkpoint.pt")
    play("train.py", tmp_path, 2, *words, "--stop_after", "2")
    first, _ = play("train.py", tmp_path, 2, *words)
    assert "step 2:" in first
    assert "step 1:" not in first
    assert loss_of(first) == same(single)


def test_two_nodes_end_at_the_same_loss(single, tmp_path):
    shape = ("--nproc_per_node=1", "--nnodes=2", "--master_addr=127.0.0.1")
    port = f"--master_port={free_port()}"
    words = (TRAIN, "--dataset_name", "wikitext", "--use_ddp", "--batch_size", "16")
    nodes = [
        start(tmp_path, *TORCHRUN, *shape, f"--node_rank={node}", port, *words) for node in (0, 1)
    ]
    assert loss_of(output(*nodes)) == same(single)


def test_torchrun_starts_the_program_of_the_document(single, tmp_path):
    words = ("--dataset_name", "wikitext", "--use_ddp", "--batch_size", "16")
    text = output(start(tmp_path, *TORCHRUN, "--nproc_per_node=2", TRAIN, *words))
    assert loss_of(text) == same(single)
    assert "rank 1 of 2" in text


def test_a_job_of_hpcrun_runs_the_program_unchanged(single, tmp_path):
    words = ("--dataset_name", "wikitext", "--use_ddp", "--batch_size", "16")
    done = jobs.hpcrun(
        *("submit", "--executor", "local", "--cpu", "--nodes", "2", "--gpus", "1"),
        *("--no-snapshot", "--", sys.executable, TRAIN, *words),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if "final loss" in line)
    assert float(line.split()[-1]) == same(single)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@forked
def test_half_precision_trains_with_ddp(tmp_path, single, dtype):
    first, _ = play("train.py", tmp_path, 2, "--use_ddp", "--batch_size", "16", "--dtype", dtype)
    assert loss_of(first) == pytest.approx(single, rel=0.1)


# The functions


def test_without_ranks_every_function_serves_one_process():
    assert tuple(hpcrun.setup_distributed()) == (0, 1, 0)
    assert (hpcrun.get_rank(), hpcrun.get_world_size(), hpcrun.is_main_process()) == (0, 1, True)
    model = nn.Linear(2, 1)
    assert hpcrun.wrap_model_ddp(model, 0) is model
    assert hpcrun.wrap_model_fsdp(model) is model
    hpcrun.cleanup_distributed()


@forked
def test_variables_of_torchrun_make_the_process_group(tmp_path):
    port = free_port()

    def rank_of(rank):
        os.environ |= {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }
        found, world_size, local_rank = hpcrun.setup_distributed()
        assert (found, world_size, local_rank) == (rank, 2, rank)
        assert (hpcrun.get_rank(), hpcrun.get_world_size()) == (rank, 2)
        assert hpcrun.is_main_process() == (rank == 0)
        hpcrun.cleanup_distributed()
        assert not dist.is_initialized()

    assert fork_ranks(2, rank_of) == [0, 0]


@ranks(2)
def test_ddp_replicates_the_model_and_averages_the_gradients(rank):
    torch.manual_seed(rank)
    model = hpcrun.wrap_model_ddp(nn.Linear(3, 1), rank)
    assert isinstance(model, DistributedDataParallel)
    agreed([value.tolist() for value in model.module.parameters()])
    model(torch.full((4, 3), float(rank))).mean().backward()
    assert agreed(model.module.weight.grad.tolist()) == [[0.5, 0.5, 0.5]]


@pytest.mark.parametrize("policy", [None, 1_000])
@ranks(2)
def test_fsdp_shards_parameters_and_optimizer_state(rank, policy):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(40, 80), nn.Linear(80, 2))
    whole = sum(value.numel() for value in layers.parameters())
    options = {}
    if policy is not None:
        options["auto_wrap_policy"] = partial(size_based_auto_wrap_policy, min_num_params=policy)
    model = hpcrun.wrap_model_fsdp(layers, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(4, 40)).mean().backward()
    optimizer.step()

    def local(value):
        return value.to_local() if isinstance(value, DTensor) else value

    kept = sum(local(value).numel() for value in model.parameters())
    assert sum(gathered(kept)) == pytest.approx(whole, rel=0.01)
    assert kept < 0.6 * whole
    moments = sum(
        local(value).numel()
        for state in optimizer.state.values()
        for name, value in state.items()
        if name == "exp_avg"
    )
    assert moments == kept


@ranks(2)
def test_a_shard_of_another_rank_is_not_loaded(rank, tmp_path):
    torch.manual_seed(0)
    model = hpcrun.wrap_model_fsdp(nn.Linear(4, 4))
    if rank == 0:
        torch.save(model.state_dict(), tmp_path / "checkpoint.pt")
    dist.barrier()
    state = torch.load(tmp_path / "checkpoint.pt")
    if rank == 1:
        with pytest.raises(UserError, match=r"weight is the shard of another rank.*Checkpointer"):
            model.load_state_dict(state)
    else:
        model.load_state_dict(state)
    model.load_state_dict(model.state_dict())


def test_the_sampler_gives_each_rank_a_contiguous_part():
    parts = [
        hpcrun.DistributedSampler(10, batch_size=2, rank=rank, world_size=3).get_indices()
        for rank in range(3)
    ]
    assert [[*part] for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    alone = hpcrun.DistributedSampler(5, 2)
    assert [*alone.get_indices()] == [0, 1, 2, 3, 4]
    assert (alone.num_samples, alone.start_idx, alone.end_idx) == (5, 0, 5)
