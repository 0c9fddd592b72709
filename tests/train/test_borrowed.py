"""Code analysis finds parameters that a module reads from another module."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hpcrun.config.training import FSDP
from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.options import LanguageModelShape
from hpcrun.train.model.borrowed_parameters import borrowed
from hpcrun.train.parallel.fsdp import units


def project(x, table):
    return F.linear(x, table.weight)


class Model(nn.Module):
    """Two layers and an embedding; the subclasses read the embedding's weights in different ways."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = self.table(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)

    def output(self, x):
        return x


class Direct(Model):
    def output(self, x):
        return x @ self.table.weight.T


class Alias(Model):
    def output(self, x):
        table = self.table
        weight = table.weight if self.training else table.weight.detach()
        return F.linear(x, weight)


class Function(Model):
    def output(self, x):
        return project(x, self.table)


class Property(Model):
    @property
    def head(self):
        return self.table.weight

    def output(self, x):
        return F.linear(x, self.head)


class Inherited(Direct):
    def forward(self, x):
        return super().forward(x).exp()


class Keyword(Model):
    def output(self, x):
        (weight,) = [module.weight for module in self.modules_tied()]
        return F.linear(input=x, weight=weight)

    def modules_tied(self):
        return [self.table]


class Called(Model):
    """A model that calls the layers, and reads only properties of the weights that a shard has too."""

    def output(self, x):
        return x.to(self.table.weight.device).view(-1, self.table.weight.shape[1])


class InALoop(Model):
    def output(self, x):
        for number, layer in enumerate(self.layers):
            if number:
                x = x + layer.weight.sum()
        return x


def names(model):
    by_id = {id(value): name for name, value in model.named_parameters()}
    return sorted(by_id[key] for key in borrowed(model))


@pytest.mark.parametrize("kind", [Direct, Alias, Function, Property, Inherited, Keyword])
def test_a_weight_of_a_submodule_that_the_model_reads_is_found(kind):
    model = kind()
    assert names(model) == ["table.weight"]
    assert borrowed(model)[id(model.table.weight)] == {id(model)}


def test_weights_read_in_a_loop_over_parts_are_found():
    assert names(InALoop()) == ["layers.0.weight", "layers.1.weight"]


@pytest.mark.parametrize("kind", [Model, Called])
def test_submodules_that_are_only_called_are_separate_units(kind):
    assert names(kind()) == []


def test_layers_of_torch_are_units_although_their_encoder_reads_them():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    assert units(encoder, FSDP()) == list(encoder.layers)


def test_a_weight_read_elsewhere_belongs_to_the_module_around_both_uses():
    model = nn.Sequential(Direct(), nn.Linear(7, 7))
    inner = model[0]
    assert units(model, FSDP(wrap="size", min_parameters=28)) == [inner, model[1]]
    # The embedding has 28 parameters, each layer 20: without the embedding the model is too small for a unit.
    assert units(model, FSDP(wrap="size", min_parameters=20)) == [*inner.layers, inner, model[1]]


def test_the_tied_matrix_of_the_shipped_gpt_stays_in_the_root_unit():
    model = GPT(LanguageModelShape(layers=2, heads=2, width=32))
    wrapped = units(model, FSDP(wrap="size", min_parameters=1000))
    assert model.embedding not in wrapped
    assert model.blocks[0].attend in wrapped


def test_code_without_a_source_is_not_followed():
    namespace = {"nn": nn, "torch": torch}
    exec("class Bare(nn.Module):\n    def forward(self, x):\n        return x", namespace)
    assert borrowed(namespace["Bare"]()) == {}
