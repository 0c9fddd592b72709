"""000: tasks for a distributed trainer. docs/seeds.md lists its statements."""

import inspect
import json
import os

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hpcrun import AMPConfig, AMPTrainer, DistributedAMPTrainer, DistributedConfig, MicroBatches
from hpcrun.errors import ClusterError
from tests.support.on_ranks import agreed, forked, gathered, ranks
from tests.support.ports import free_port
from tests.support.training.forks import fork_ranks


class Model(nn.Module):
    """A model that returns its loss."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, y):
        return (self.layer(x).squeeze(1) - y).square().mean()


def make(rank, world_size, **options):
    """Return a trainer with the document's arguments, in its order."""
    torch.manual_seed(0)
    config = options.pop("config", AMPConfig())
    return DistributedAMPTrainer(Model(), config, rank, world_size, "gloo", None, **options)


def batch_of(number):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    return [x, x.sum(1)]


def weights(trainer):
    return torch.cat([value.detach().flatten() for value in trainer.module.parameters()])


# The trainer


def test_the_distributed_trainer_extends_the_trainer_of_one_device():
    assert issubclass(DistributedAMPTrainer, AMPTrainer)
    for name, method in inspect.getmembers(AMPTrainer, inspect.isfunction):
        if not name.startswith("_"):
            wanted = inspect.signature(method).parameters
            assert [*inspect.signature(getattr(DistributedAMPTrainer, name)).parameters][
                : len(wanted)
            ] == [*wanted], name


@ranks(2)
def test_the_constructor_takes_model_config_rank_size_and_backend(rank, world_size):
    trainer = make(rank, world_size)
    found = trainer.setup_distributed()
    assert (found.rank, found.world_size, found.backend) == (rank, world_size, "gloo")
    assert found.device_ids == ()
    named = DistributedAMPTrainer(
        model=Model(), config=AMPConfig(dtype="bf16"),
        rank=rank, world_size=world_size, backend="gloo", device_ids=None,
    )  # fmt: skip
    assert named.amp.dtype == "bf16"


@ranks(2)
def test_wrapping_returns_ddp_with_the_options_of_the_config(rank, world_size):
    given = {
        "find_unused_parameters": True,
        "broadcast_buffers": False,
        "gradient_as_bucket_view": False,
    }
    place = DistributedConfig(
        world_size=world_size, rank=rank, local_rank=rank, num_gpus_per_node=world_size, **given
    )
    trainer = DistributedAMPTrainer(Model(), AMPConfig(), distributed=place)
    trainer.setup_distributed()
    wrapped = trainer.wrap_model(trainer.module)
    assert isinstance(wrapped, DistributedDataParallel)
    assert {name: getattr(wrapped, name) for name in given} == given
    assert isinstance(make(rank, world_size).wrap_model(), DistributedDataParallel)


@forked
def test_the_trainer_makes_the_group_and_wraps_the_model(tmp_path):
    port = free_port()

    def play(rank):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        trainer = make(rank, 2)
        trainer.setup_distributed()
        assert dist.get_world_size() == 2
        trainer.training_step(batch_of(rank))
        assert isinstance(trainer.model, DistributedDataParallel)
        agreed(weights(trainer).tolist())
        dist.destroy_process_group()

    assert fork_ranks(2, play) == [0, 0]


@ranks(2)
def test_a_step_averages_the_gradients_of_the_ranks(rank, world_size):
    trainer = make(rank, world_size)
    first = trainer.training_step(batch_of(rank))
    one = AMPTrainer(Model(), AMPConfig())
    one.module.load_state_dict(make(rank, world_size).module.state_dict())
    one.training_step(MicroBatches([batch_of(0), batch_of(1)]))
    torch.testing.assert_close(weights(trainer), weights(one))
    agreed(weights(trainer).tolist())
    assert float(first) == pytest.approx(first.item())
    assert f"{first:.4f}" == f"{first.item():.4f}"


@ranks(2)
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank, world_size):
    trainer = make(rank, world_size, config=AMPConfig(dtype="fp16", init_scale=1024.0))
    trainer.training_step(batch_of(rank))
    before, scale = weights(trainer), agreed(trainer.scaler.get_scale())
    x, y = batch_of(2)
    result = trainer.training_step([x * (float("inf") if rank == 1 else 1.0), y])
    assert agreed(result.skipped)
    assert torch.equal(weights(trainer), before)
    assert agreed(trainer.scaler.get_scale()) == scale / 2


@ranks(2)
def test_only_rank_0_writes_a_checkpoint_and_all_read(rank, world_size, tmp_path):
    trainer = make(rank, world_size)
    trainer.training_step(batch_of(rank))
    path = tmp_path / "checkpoint.pth"
    if rank == 1:
        trainer.save_checkpoint(path)
    dist.barrier()
    assert not path.exists()
    dist.barrier()
    trainer.save_checkpoint(path, rank=0)
    dist.barrier()
    saved = weights(trainer)
    trainer.training_step(batch_of(2 + rank))
    assert not torch.equal(weights(trainer), saved)
    trainer.load_checkpoint(path)
    assert torch.equal(weights(trainer), saved)
    trainer.training_step(batch_of(4 + rank))
    agreed(weights(trainer).tolist())


@ranks(2)
def test_a_program_asks_if_it_is_distributed(rank, world_size):
    assert DistributedAMPTrainer.is_distributed()
    trainer = make(rank, world_size)
    assert trainer.is_distributed
    assert trainer.is_distributed()
    assert not AMPTrainer(Model(), AMPConfig()).is_distributed
    assert trainer.is_main_process == (rank == 0)


def test_a_process_without_ranks_is_not_distributed():
    assert not DistributedAMPTrainer.is_distributed()
    assert not DistributedAMPTrainer(Model(), AMPConfig()).is_distributed


@ranks(2)
def test_ranks_with_unequal_work_train_to_the_end(rank, world_size):
    trainer = make(rank, world_size)
    loader = DataLoader(TensorDataset(*batch_of(0)), batch_size=2 if rank == 0 else 4)
    assert gathered(len(loader)) == [4, 2]
    steps = [trainer.training_step(batch) for batch in trainer.even(loader)]
    agreed(len(steps))
    agreed(weights(trainer).tolist())


# The configuration

FIELDS = {
    **{"world_size": 8, "rank": 5, "backend": "nccl"},
    **{"master_addr": "host0", "master_port": 29500, "num_nodes": 2, "node_rank": 1},
    **{"num_gpus_per_node": 4, "device_ids": [1]},
    **{"find_unused_parameters": True, "broadcast_buffers": False},
    **{"gradient_as_bucket_view": False, "launch_method": "torchrun"},
}
"""The document's fields. Its class has no local rank: hpcrun's has."""


def described(**changes):
    return DistributedConfig(**{**FIELDS, "local_rank": 1, **changes})


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_config_is_an_argument(name):
    value = getattr(described(), name)
    assert (list(value) if isinstance(value, tuple) else value) == FIELDS[name]


def test_both_launch_methods_are_accepted():
    found = {
        described(launch_method=name).launch_method
        for name in ("torchrun", "torch.distributed.launch")
    }
    assert found == {"torchrun"}


def test_variables_of_the_environment_describe_the_same_config():
    variables = described().to_env_dict()
    assert all(isinstance(value, str) for value in variables.values())
    again = DistributedConfig.from_env(variables, visible_devices=4)
    for name in ("world_size", "rank", "master_addr", "master_port", "num_nodes", "node_rank"):
        assert getattr(again, name) == FIELDS[name]
    assert (again.local_rank, again.num_gpus_per_node, again.launch_method) == (1, 4, "torchrun")


@pytest.mark.parametrize(
    "wrong", [{"rank": 8}, {"node_rank": 2}, {"world_size": 7, "launch_method": "single"}]
)
def test_validation_returns_true_or_names_the_error(wrong):
    assert described(master_addr="127.0.0.1").validate(visible_devices=4) is True
    with pytest.raises(ClusterError) as refusal:
        described(master_addr="127.0.0.1", **wrong).validate(visible_devices=4)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("suffix", "write"), [(".yaml", yaml.safe_dump), (".json", json.dumps)])
def test_a_config_is_read_from_yaml_and_json(tmp_path, suffix, write):
    given = tmp_path / f"given{suffix}"
    given.write_text(write({**FIELDS, "local_rank": 1}))
    found = DistributedConfig.from_file(given)
    assert found == described()
    found.to_file(tmp_path / f"written{suffix}")
    assert DistributedConfig.from_file(tmp_path / f"written{suffix}") == found
