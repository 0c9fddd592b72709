"""The average of the weights, against the formula; ``test_precision.py`` tests skipped steps."""

import pytest
import torch
from torch import nn

from hpcrun.train.step.ema import WeightAverage
from hpcrun.train.step.trainer import AMPTrainer


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model[2].bias.requires_grad_(False)
    return model


def batch(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def loss(model, inputs):
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def trainer(model, **options):
    return AMPTrainer(model, sgd, ema=0.8, device="cpu", **options)


def copied(tensors):
    return {name: value.detach().clone() for name, value in tensors.items()}


def test_each_step_moves_the_average_towards_the_weights():
    model = net()
    made = trainer(model)
    expected = copied(dict(model.named_parameters()))
    for step in range(4):
        made.training_step(batch(step), loss)
        for name, value in model.named_parameters():
            expected[name] = 0.8 * expected[name] + 0.2 * value.detach()
    averages = made.average.tensors()
    assert averages.keys() == expected.keys() - {"2.bias"}
    for name, value in averages.items():
        torch.testing.assert_close(value, expected[name])
        assert not torch.equal(value, model.get_parameter(name))


def test_in_the_block_the_model_has_averaged_weights():
    model = net()
    made = trainer(model)
    made.training_step(batch(0), loss)
    before, averages = copied(model.state_dict()), copied(made.average.tensors())
    inside = {}

    def judged_and_failed():
        with made.averaged():
            inside.update(copied(model.state_dict()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        judged_and_failed()
    for name, value in inside.items():
        assert torch.equal(value, averages.get(name, before[name]))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, averages[name]) for name, value in made.average.tensors().items())


def test_a_checkpoint_keeps_the_average_exactly(tmp_path):
    made = trainer(net())
    for step in range(3):
        made.training_step(batch(step), loss)
    assert made.save_checkpoint(tmp_path / "with", 3).ok
    again = trainer(net())
    restored = again.load_checkpoint(tmp_path / "with")
    assert restored.notes == ()
    for name, value in made.average.tensors().items():
        assert torch.equal(again.average.tensors()[name], value)

    plain = AMPTrainer(net(), sgd, device="cpu")
    # Saved averages that the config no longer uses are ignored.
    assert plain.load_checkpoint(tmp_path / "with").step == 3
    assert plain.save_checkpoint(tmp_path / "without", 3).ok
    late = trainer(net())
    (note,) = late.load_checkpoint(tmp_path / "without").notes
    assert (
        note
        == "the checkpoint has no average of the weights; the average starts from the loaded weights"
    )
    for name, value in late.average.tensors().items():
        assert torch.equal(value, made.module.get_parameter(name))


def test_a_newly_trained_parameter_begins_its_average_at_its_value(tmp_path):
    def everything(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    made = AMPTrainer(net(), everything, ema=0.8, device="cpu")
    made.training_step(batch(0), loss)
    assert made.save_checkpoint(tmp_path, 1).ok
    thawed = net()
    thawed[2].bias.requires_grad_(True)
    with torch.no_grad():
        thawed[2].bias.fill_(9.0)
    again = AMPTrainer(thawed, everything, ema=0.8, device="cpu")
    (note,) = again.load_checkpoint(tmp_path).notes
    assert (
        note
        == "the checkpoint has no average of 2.bias; the average starts from the loaded weights"
    )
    averages = again.average.tensors()
    assert torch.equal(averages["2.bias"], made.module[2].bias)
    assert torch.equal(averages["0.weight"], made.average.tensors()["0.weight"])


def test_a_submodule_with_the_name_of_a_wrapper_keeps_it():
    average = WeightAverage(nn.ModuleDict({"module": nn.Linear(2, 1)}), 0.9)
    assert average.tensors().keys() == {"module.weight", "module.bias"}
