"""The arguments of the trainers, in the forms that PyTorch programs write, and their refusals."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpcrun import (
    AMPConfig,
    AMPTrainer,
    DistributedAMPTrainer,
    Preparation,
    UserError,
    create_default_amp_config,
)
from hpcrun.devices import accelerator
from tests.support.on_ranks import agreed, ranks
from tests.support.training.parallelism import Net, adamw, flat
from tests.support.training.small_training import loss

X, Y = torch.arange(24.0).reshape(4, 6) / 10, torch.arange(4.0)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def seeded(make=Net):
    torch.manual_seed(0)
    return make()


def test_a_config_in_second_place_makes_adamw():
    config = create_default_amp_config(
        use_dynamic_scaling=True, dynamic_history_size=100, initial_scale=2.0**15
    )
    assert config == AMPConfig(dtype="fp16", init_scale=2.0**15, growth_interval=100, dynamic=True)
    for made in (
        DistributedAMPTrainer(seeded(), config, 0, 1, "gloo", None),
        DistributedAMPTrainer(seeded(), config=config, rank=0, world_size=1),
        AMPTrainer(seeded(), config, device="cpu"),
        AMPTrainer(seeded(), amp=config, device="cpu"),
    ):
        assert made.scaler.get_scale() == 2.0**15
        made.training_step((X, Y), loss)
        assert type(made.optimizer) is torch.optim.AdamW
        assert made.optimizer.param_groups[0]["lr"] == 1e-3
    made = DistributedAMPTrainer(seeded(), learning_rate=1e-4, accumulation_steps=4)
    assert (made.optimizer.param_groups[0]["lr"], made.accumulation.calls) == (1e-4, 4)
    fixed = create_default_amp_config(use_dynamic_scaling=False, initial_scale=8.0)
    assert AMPTrainer(seeded(), fixed, device="cpu").scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"optimizer": AMPConfig(), "config": AMPConfig()}, "the precision was given twice"),
        ({"config": {"dtype": "bf16"}}, r"is an AMPConfig, such as .*, not a dict"),
        ({"optimizer": sgd, "learning_rate": 0.1}, "set lr in your optimizer"),
        ({"optimizer": "adamw"}, "an AMPConfig, an optimizer, or a function .*, not a str"),
        ({"optimizer": torch.optim.SGD}, r"lambda model: SGD\(model.parameters\(\), .* of a class"),
        ({"learning_rate": "1e-4"}, "learning_rate='1e-4' is not a number from 0 on"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 is not a number from 0 on"),
        ({"device_ids": [0]}, r"device_ids=\[0\]: this process sees no GPU; omit device_ids"),
        ({"accumulation_steps": 0}, "accumulation_steps=0 is not a whole number from 1 on"),
        ({"parallel": "DDP"}, 'not one of single, dp, ddp, fsdp; write "ddp"'),
        ({"parallel": "bogus"}, "'bogus' is not one of single, dp, ddp, fsdp; use one of"),
        ({"parallel": "dp", "rank": 0, "world_size": 2}, "dp works in one process only"),
    ],
)
def test_contradicting_arguments_are_refused(given, line, monkeypatch):
    monkeypatch.setattr(accelerator, "count", lambda: 0)
    with pytest.raises(ValueError, match=line):
        DistributedAMPTrainer(seeded(), **{"optimizer": None, **given})


@ranks(2)
def test_is_distributed_is_an_attribute_and_a_function(rank):
    assert DistributedAMPTrainer.is_distributed()
    made = DistributedAMPTrainer(seeded(), AMPConfig())
    assert made.is_distributed
    assert made.is_distributed()
    assert made.mean(torch.tensor(rank + 1.0)) == agreed(1.5)


def test_one_process_is_not_distributed():
    assert not DistributedAMPTrainer.is_distributed
    made = AMPTrainer(seeded(), device="cpu")
    assert made.is_distributed() is False
    assert repr(made.is_distributed) == "False"
    assert made.mean(made.training_step((X, Y), loss)) > 0
    several = DistributedAMPTrainer(seeded(), rank=0, world_size=2, backend="gloo")
    with pytest.raises(RuntimeError, match=r"2 ranks .*call setup_distributed\(\) and wrap_model"):
        several.training_step((X, Y), loss)


def test_wrap_model_takes_the_model_or_another_model_before():
    model, other = seeded(), Net()
    made = DistributedAMPTrainer(model, AMPConfig())
    assert made.wrap_model(model) is made.wrap_model() is made.model
    with pytest.raises(UserError, match="has wrapped its model, and this is another model"):
        made.wrap_model(other)
    made = DistributedAMPTrainer(model, AMPConfig())
    assert made.wrap_model(other) is other
    made.training_step((X, Y), loss)
    assert made.module is other
    with pytest.raises(UserError, match="has an optimizer of its model"):
        DistributedAMPTrainer(model, sgd(model)).wrap_model(other)


def test_gradient_checkpointing_is_turned_on_before_the_first_step():
    for kind in (DistributedAMPTrainer, AMPTrainer):
        made, plain = kind(seeded(), sgd, device="cpu"), kind(seeded(), sgd, device="cpu")
        made.enable_gradient_checkpointing()
        for trainer in (made, plain):
            trainer.training_step((X, Y), loss)
        names = [type(block).__name__ for block in made.module.blocks]
        assert set(names) == {"CheckpointWrapper"}
        # The recomputation passes through the blocks again, and the root counts its passes once.
        assert made.module.passes == 1
        assert torch.equal(flat(made.module), flat(plain.module))
        for late in (made, plain):
            with pytest.raises(
                UserError, match=r"training has begun.* before .*first training step"
            ):
                late.enable_gradient_checkpointing()


class Loses(nn.Module):
    """A model that computes its loss itself, in one of the known forms."""

    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(6, 1), form

    def forward(self, x, y=None):
        return self.form((self.layer(x).squeeze(-1) - (0 if y is None else y)).square().mean())


@pytest.mark.parametrize("batch", [[X, Y], (X, Y), {"x": X, "y": Y}, X], ids=type)
@pytest.mark.parametrize(
    "form",
    [
        lambda value: value,
        lambda value: {"loss": value, "logits": X},
        lambda value: SimpleNamespace(loss=value),
        lambda value: (X, value, torch.tensor(3)),
    ],
    ids=["tensor", "dict", "object", "tuple"],
)
def test_without_a_loss_the_output_is_the_loss(form, batch):
    made = AMPTrainer(seeded(lambda: Loses(form)), sgd, device="cpu")
    twin = seeded(lambda: Loses(lambda value: value))
    result = made.training_step(batch)
    value = twin(X) if batch is X else twin(X, Y)
    assert float(result) == result.item() == value.item()
    assert f"Loss: {result}, {result:.4f}" == f"Loss: {value.item()}, {value.item():.4f}"
    value.backward()
    sgd(twin).step()
    assert torch.equal(flat(made.module), flat(twin))


@pytest.mark.parametrize(
    ("form", "line"),
    [
        (lambda value: value[None], r"returned a tensor of shape \(1,\) in float32, which has no"),
        (lambda value: {"logits": value}, "returned a dict with the keys logits, which has no"),
        (lambda value: (value, value), "returned a tuple of 2, not with one scalar"),
        (lambda value: value.item(), "returned a float, which has no loss; pass a function"),
    ],
)
def test_an_output_without_a_loss_is_refused(form, line):
    with pytest.raises(UserError, match=line):
        AMPTrainer(seeded(lambda: Loses(form)), sgd, device="cpu").training_step((X, Y))


@pytest.mark.parametrize(
    ("batch", "computed", "hint"),
    [
        ([X], loss, "one batch, here a list of 1, .* pass hpcrun.MicroBatches"),
        ([X, Y, X], None, "the model gets the 3 items of a list batch as positional"),
        ({"z": X}, None, "the model gets the items of a dict batch as keywords"),
    ],
)
def test_an_error_of_a_first_step_explains_the_batch(batch, computed, hint):
    made = AMPTrainer(seeded(lambda: Loses(lambda value: value)), sgd, device="cpu")
    with pytest.raises((TypeError, ValueError), match=f"(?s){hint}"):
        made.training_step(batch, computed)


def test_dp_trains_as_one_process(capsys, monkeypatch):
    def trained(parallel, make=Net, **options):
        made = DistributedAMPTrainer(
            seeded(make), adamw, device="cpu", parallel=parallel, **options
        )
        made.training_step((X, Y), loss if make is Net else None)
        return made

    plain = flat(trained("single").module)
    assert capsys.readouterr().out == ""
    assert torch.equal(flat(trained("dp").module), plain)
    assert capsys.readouterr().out.startswith("hpcrun: parallel=dp finds no GPU; it trains on the")
    with pytest.raises(UserError, match="dp copies the model in every step"):
        trained("dp", preparation=Preparation(compile="default"))
    # torch's wrapper without GPUs passes the calls on to its module.
    monkeypatch.setattr(accelerator, "is_accelerator", lambda _: True)
    monkeypatch.setattr(accelerator, "count", lambda: 2)
    made = trained("dp")
    assert type(made.model) is nn.DataParallel
    assert torch.equal(flat(made.module), plain)
    # DataParallel gathers the loss of each GPU.
    several = trained("dp", lambda: Loses(lambda value: torch.stack([value, value])))
    assert torch.equal(
        flat(several.module), flat(trained("single", lambda: Loses(lambda value: value)).module)
    )


def test_several_ranks_with_a_trainer_for_one_get_a_line(monkeypatch):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for ranks_of, lines in (("0022", 1), ("1122", 0), ("0011", 0)):
        for name, value in zip(names, ranks_of, strict=True):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", "29500")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            AMPTrainer(seeded(), sgd, device="cpu")
            DistributedAMPTrainer(seeded(), sgd)
        assert len(seen) == lines
        assert all("the job has 2 ranks, so each rank trains a sep" in str(x.message) for x in seen)
        assert all(x.filename == __file__ for x in seen)
