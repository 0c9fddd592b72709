"""003: distributed guide. docs/seeds.md lists its statements."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hpcrun import AMPConfig, AMPTrainer, DistributedAMPTrainer, wrap_model_fsdp
from hpcrun.ranks.existing_group import ExistingGroup, place_in_group
from tests.seeds.playing import PROGRAMS, output, start
from tests.seeds.test_000_trainer_tasks import batch_of, weights
from tests.support.on_ranks import agreed, gathered, ranks
from tests.support.ports import free_port

SPAWNED = str(PROGRAMS / "spawned.py")


class Deep(nn.Module):
    """A model of blocks that returns a mapping with the loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)
        )

    def forward(self, x, y):
        for block in self.blocks:
            x = x + block(x)
        return {"loss": (x.sum(1) - y).square().mean()}


def make(rank, world_size, **options):
    torch.manual_seed(0)
    return DistributedAMPTrainer(
        Deep(), AMPConfig(), rank=rank, world_size=world_size, learning_rate=0.01, **options
    )


def test_one_process_trains_several_devices_by_data_parallel():
    trainer = make(0, 1, parallel="dp")
    assert isinstance(trainer.wrap_model(), nn.DataParallel | Deep)
    losses = [float(trainer.training_step(batch_of(0))) for _ in range(20)]
    assert losses[-1] < losses[0]
    plain = AMPTrainer(Deep(), lambda model: torch.optim.Adam(model.parameters(), lr=0.001))
    assert float(plain.training_step(batch_of(0))) > 0


def test_a_model_in_data_parallel_is_saved_without_wrapper(tmp_path):
    model = torch.nn.DataParallel(Deep())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    trainer = AMPTrainer(model, optimizer, device="cpu")
    trainer.training_step(batch_of(0))
    trainer.save_checkpoint(tmp_path / "checkpoint.pth")
    saved = torch.load(tmp_path / "checkpoint.pth", map_location="cpu")
    Deep().load_state_dict(saved["model_state_dict"])


def test_another_parallelism_is_refused_with_the_values():
    with pytest.raises(ValueError, match=r"single.*ddp.*fsdp|dp.*single"):
        make(0, 1, parallel="bogus")


def test_python_starts_the_ranks_of_each_machine(tmp_path):
    shape = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    started = [
        start(tmp_path, SPAWNED, "1", environ=shape | {"RANK": str(first)}) for first in (0, 1)
    ]
    assert "2 ranks, average loss" in output(*started)


def test_more_ranks_than_gpus_are_on_several_machines():
    given = {
        **{"MASTER_ADDR": "192.168.1.10", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "4"},
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    }
    place = place_in_group(ExistingGroup(6, 8, nccl=True), given)
    assert (place.local_rank, place.local_world_size) == (2, 4)
    assert (place.node_rank, place.num_nodes) == (1, 2)


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
@ranks(2)
def test_compressed_gradients_train_with_mixed_precision(rank, world_size, hook, tmp_path):
    dtype = {"fp16": "fp16", "bf16": "bf16", "powersgd": "fp16"}[hook]
    torch.manual_seed(0)

    def new():
        return DistributedAMPTrainer(
            Deep(), AMPConfig(dtype=dtype), rank=rank, world_size=world_size,
            learning_rate=0.01, comm_hook=hook,
        )  # fmt: skip

    trainer = new()
    losses = [float(trainer.training_step(batch_of(rank))) for _ in range(8)]
    assert losses[-1] < losses[0]
    agreed(weights(trainer).tolist())


@ranks(2)
def test_a_hook_that_the_program_registers_is_used(rank, world_size):
    trainer = make(rank, world_size)
    trainer.setup_distributed()
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
    )
    trainer.wrap_model().register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for number in range(4):
        trainer.training_step(batch_of(10 * rank + number))
    assert state.iter > 0
    agreed(weights(trainer).tolist())


@ranks(2)
def test_a_model_in_ddp_is_not_wrapped_again(rank, world_size):
    torch.manual_seed(0)
    model, plain = DistributedDataParallel(Deep()), DistributedDataParallel(Deep())
    plain.load_state_dict(model.state_dict())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = DistributedAMPTrainer(model, optimizer, rank=rank, world_size=world_size)
    assert trainer.wrap_model() is model
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(2):
        batch = batch_of(10 * rank + number)
        trainer.training_step(batch)
        by_hand.zero_grad()
        plain(*batch)["loss"].backward()
        by_hand.step()
        agreed(weights(trainer).tolist())
    # PowerSGD begins later.
    torch.testing.assert_close(
        weights(trainer), torch.cat([p.flatten() for p in plain.parameters()])
    )


@ranks(2)
def test_a_wrapper_that_the_trainer_contradicts_is_refused(rank, world_size):
    place = {"rank": rank, "world_size": world_size}
    model = DistributedDataParallel(Deep())
    sharded = wrap_model_fsdp(Deep())
    for wrapped, words in [
        (model, {"parallel": "fsdp"}),
        (model, {"comm_hook": "fp16"}),
        (sharded, {"parallel": "fsdp"}),
        (sharded, {}),
    ]:
        with pytest.raises(ValueError, match=r"already.*give the trainer the model"):
            DistributedAMPTrainer(wrapped, AMPConfig(), **place, **words)
    with pytest.raises(ValueError, match="use DistributedAMPTrainer"):
        AMPTrainer(model, AMPConfig())


@ranks(2)
def test_the_loss_is_averaged_over_the_ranks(rank, world_size):
    trainer = make(rank, world_size)
    result = trainer.training_step(batch_of(rank))
    by_hand = result.loss.clone()
    dist.all_reduce(by_hand, op=dist.ReduceOp.SUM)
    assert float(trainer.mean(result.loss)) == pytest.approx(by_hand.item() / world_size)
    agreed(float(trainer.mean(result.loss)))
    assert len({*gathered(float(result))}) == 2


@ranks(2)
def test_gradient_checkpointing_changes_no_weight(rank, world_size):
    plain, saving = make(rank, world_size), make(rank, world_size)
    saving.enable_gradient_checkpointing()
    for trainer in (plain, saving):
        trainer.training_step(batch_of(rank))
    assert torch.equal(weights(plain), weights(saving))
