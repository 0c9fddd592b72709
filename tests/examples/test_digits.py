"""The tasks on digits: their splits, their losses, and what they learn."""

import sys

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import Normal, kl_divergence

from examples.autoencoder import Autoencoder, bound
from examples.classifier import Classifier
from examples.digits import splits
from hpcrun import Task
from hpcrun.config import Config
from hpcrun.errors import UserError


def task(kind: type[Task], **model: object) -> Task:
    return kind(Config.model_validate({"seed": 3, "model": model}))


def batch(learner: Task, count: int = 6) -> list[torch.Tensor]:
    train = learner.train_dataset()
    return [torch.stack(parts) for parts in zip(*(train[i] for i in range(count)), strict=True)]


def trained(learner: Task, epochs: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model, train = learner.build_model(), learner.train_dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(train)).split(64):
            optimizer.zero_grad()
            chosen = [train.images[part], train.classes[part], train.numbers[part]]
            learner.loss(model, chosen).backward()
            optimizer.step()
    return model


def test_a_split_keeps_its_digits_when_another_changes():
    few, many = splits(0.1, 0.2), splits(0.3, 0.2)
    sets = [set(part.numbers.tolist()) for part in few.values()]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 1797
    assert torch.equal(few["test"].numbers, many["test"].numbers)
    assert sets[1] < set(many["validation"].numbers.tolist())
    with pytest.raises(UserError, match="the test split has no digits"):
        splits(0.15, 1e-9)


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UserError, match=r"^data: .*; pip install scikit-learn$"):
        task(Classifier).prepare()


def test_the_bound_is_the_binomial_likelihood_and_the_divergence():
    generator = torch.Generator().manual_seed(1)
    ink = torch.randint(0, 17, (3, 1, 8, 8), generator=generator)
    logits = torch.randn(3, 64, generator=generator)
    mean, log_variance = torch.randn(2, 3, 5, generator=generator)
    pixels, cost = bound(ink / 16, logits, mean, log_variance)
    likelihood = stats.binom.logpmf(ink.flatten(1).numpy(), 16, logits.sigmoid().numpy()).sum(-1)
    np.testing.assert_allclose(pixels.numpy(), -likelihood, rtol=1e-5)
    code = Normal(mean, (0.5 * log_variance).exp())
    torch.testing.assert_close(cost, kl_divergence(code, Normal(0.0, 1.0)).sum(-1))


def test_both_tasks_learn():
    classifier = task(Classifier, channels=8, blocks=1)
    report = classifier.report(trained(classifier, 10), 0.5)
    assert report["test_accuracy"] > 0.9
    assert sum(map(sum, report["confusion_matrix"])) == len(classifier.splits["test"])
    packer = task(Autoencoder, hidden=96)
    report = packer.report(trained(packer, 60), None)
    assert report["test_loss"] < report["independent_pixels"]
