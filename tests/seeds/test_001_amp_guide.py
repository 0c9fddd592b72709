"""001: guide to distributed training with AMP. docs/seeds.md lists its statements."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hpcrun import (
    AMPTrainer,
    DistributedAMPTrainer,
    DistributedConfig,
    MicroBatches,
    create_default_amp_config,
    scaled_lr,
)
from hpcrun.network.nccl.lint import lint
from hpcrun.network.nccl.rules import settings_of
from tests.diagnose.test_catalog import diagnosis
from tests.seeds.playing import PROGRAMS, loss_of, output, play, start
from tests.seeds.test_000_trainer_tasks import Model, batch_of, weights
from tests.support.on_ranks import agreed, forked, ranks

CONFIG = "learning_rate: 0.1\nepochs: 3\n"


@forked
def test_the_loop_of_the_guide_trains_as_it_stands(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    first, second = play("guide.py", tmp_path, 2, "--config", "config.yaml")
    losses = [float(line.split()[1]) for line in first.splitlines() if line.startswith("Loss")]
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    # A step with too large a scale halves it.
    (scale,) = (line.split()[1] for line in first.splitlines() if line.startswith("scale"))
    assert 2.0**10 <= float(scale) <= 2.0**15
    assert "saved after 12 steps\n" in first
    assert loss_of(first) < losses[0]
    assert second == "rank 1 of 2: True\n"


@forked
def test_the_older_launcher_trains_like_torchrun(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    words = ("--config", "config.yaml")
    first, _ = play("guide.py", tmp_path, 2, *words)
    shape = ("--nproc_per_node=2", "--nnodes=1", str(PROGRAMS / "guide.py"))
    text = output(start(tmp_path, "-m", "torch.distributed.launch", *shape, *words))
    assert loss_of(text) == loss_of(first)


@ranks(2)
def test_gradients_accumulate_over_steps_of_each_rank(rank, world_size):
    torch.manual_seed(0)
    trainer = DistributedAMPTrainer(model=Model(), accumulation_steps=4, learning_rate=1e-2)
    before = weights(trainer)
    for number in range(3):
        trainer.training_step(batch_of(4 * rank + number))
        assert torch.equal(weights(trainer), before)
    trainer.training_step(batch_of(4 * rank + 3))
    torch.manual_seed(0)
    whole = AMPTrainer(Model(), learning_rate=1e-2)
    whole.training_step(MicroBatches([batch_of(number) for number in range(8)]))
    torch.testing.assert_close(weights(trainer), weights(whole))


def test_the_learning_rate_scales_linearly_or_by_the_root():
    assert scaled_lr(1e-4, 4, "linear") == pytest.approx(4e-4)
    assert scaled_lr(1e-4, 4, "sqrt") == pytest.approx(1e-4 * math.sqrt(4))


def test_a_schedule_of_the_program_follows_the_steps():
    trainer = DistributedAMPTrainer(
        model=Model(), learning_rate=0.4, rank=0, world_size=1,
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=8, eta_min=0.04),
    )  # fmt: skip
    rates = [trainer.training_step(batch_of(number)).learning_rate for number in range(9)]
    assert rates[0] == pytest.approx(0.4)
    assert rates[-1] == pytest.approx(0.04)
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("dynamic", [True, False])
def test_the_default_precision_scales_the_loss_dynamically(dynamic):
    config = create_default_amp_config(
        use_dynamic_scaling=dynamic, dynamic_history_size=2, initial_scale=2.0**5
    )
    trainer = DistributedAMPTrainer(model=Model(), config=config, rank=0, world_size=1)
    for number in range(2):
        assert trainer.scaler.get_scale() == 2.0**5
        assert not trainer.training_step(batch_of(number)).skipped
    assert trainer.scaler.get_scale() == (2.0**6 if dynamic else 2.0**5)


@ranks(2)
def test_a_sampler_gives_each_rank_a_separate_part(rank, world_size):
    inputs = torch.arange(64.0)
    sampler = DistributedSampler(inputs, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(TensorDataset(inputs), batch_size=8, sampler=sampler, num_workers=0)
    own = torch.cat([batch for (batch,) in loader])
    everything = [torch.empty(32) for _ in range(world_size)]
    dist.all_gather(everything, own)
    assert torch.equal(torch.cat(everything).sort().values, inputs)


def test_a_loader_drops_the_last_partial_batch():
    trainer = DistributedAMPTrainer(model=Model(), learning_rate=0.1, rank=0, world_size=1)
    x = torch.randn(70, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=32, shuffle=True, drop_last=True)
    losses = [float(trainer.training_step(batch)) for _ in range(40) for batch in loader]
    assert len(losses) == 80
    assert losses[-1] < 0.1 * losses[0]


def test_a_step_is_profiled():
    trainer = DistributedAMPTrainer(model=Model(), rank=0, world_size=1)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(
        activities=activities, record_shapes=True, profile_memory=True
    ) as profiler:
        trainer.training_step(batch_of(0))
    assert "aten::addmm" in profiler.key_averages().table(sort_by="cuda_time_total")


@ranks(2)
def test_a_program_prints_its_process_group(rank, world_size):
    assert dist.is_initialized()
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
    agreed(dist.get_backend())


@pytest.mark.parametrize(("gpus", "place"), [("", (5, 8, 0, 1)), ("0,1,2,3", (1, 4, 1, 2))])
def test_five_variables_describe_a_rank(gpus, place):
    local_rank, on_node, node, nodes = place
    variables = {
        **{"RANK": "5", "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "8"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "CUDA_VISIBLE_DEVICES": gpus},
    }
    found = DistributedConfig.from_env(variables)
    assert (found.rank, found.local_rank, found.world_size) == (5, local_rank, 8)
    assert (found.num_gpus_per_node, found.node_rank, found.num_nodes) == (on_node, node, nodes)
    assert (found.master_addr, found.master_port) == ("127.0.0.1", 29500)
    assert found.validate(visible_devices=4) is True


MESSAGES = [
    ("RuntimeError: Address already in use", "free port"),
    ("RuntimeError: CUDA out of memory", "batch size"),
    ("NCCL error: invalid usage", "NCCL_DEBUG=WARN"),
    ("RuntimeError: Mismatch in world size", "node"),
    ("RuntimeError: Expected to have finished reduction", "find_unused_parameters"),
    ("NCCL error: unhandled system error", "NCCL_DEBUG=WARN"),
    ("RuntimeError: CUDA error: invalid configuration argument", "CUDA_VISIBLE_DEVICES"),
    (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)",
        "furthest behind",
    ),
]


@pytest.mark.parametrize(("line", "remedy"), MESSAGES)
def test_an_error_of_the_table_has_a_remedy(line, remedy):
    found = diagnosis(line)
    assert found is not None
    assert remedy in found.remedy


VARIABLES = [
    *({"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG": "WARN"}, {"NCCL_IB_DISABLE": "1"}),
    *({"NCCL_P2P_LEVEL": "NVL"}, {"NCCL_SOCKET_IFNAME": "eth0"}, {"NCCL_NET_GDR_LEVEL": "5"}),
    {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
]
WITHOUT_EFFECT = [
    ({"NCCL_DEBUG": "ERROR"}, "WARN"),
    ({"NCCL_TIMEOUT": "1800"}, "init_process_group(timeout=...)"),
    ({"NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT"),
]


@pytest.mark.parametrize("variables", VARIABLES)
def test_a_variable_of_the_guide_is_accepted(variables):
    assert not [one for one in lint(settings_of(variables, "test")) if one.level == "error"]


@pytest.mark.parametrize(("variables", "instead"), WITHOUT_EFFECT)
def test_a_variable_without_effect_gets_the_better_form(variables, instead):
    assert [one for one in lint(settings_of(variables, "test")) if instead in one.message]
