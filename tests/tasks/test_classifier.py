"""The classifier learns, and the counts in its report are right."""

import json

import torch
from torch.nn import functional as F

from hpcrun.config import Config
from hpcrun.tasks.classifier import Classifier, answered


def task(**model: object) -> Classifier:
    return Classifier(Config.model_validate({"model": {"channels": 8, "blocks": 1, **model}}))


def test_it_reads_nine_in_ten_unseen_digits_after_seconds_of_training():
    torch.manual_seed(0)
    learner = task()
    model, train = learner.build_model(), learner.train_dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(10):
        for part in torch.randperm(len(train)).split(64):
            optimizer.zero_grad()
            learner.loss(model, [train.images[part], train.classes[part], None]).backward()
            optimizer.step()
    report = learner.report(model, 0.5)
    assert report["test_accuracy"] > 0.9
    assert report["validation_loss"] == 0.5


def test_the_confusions_are_those_of_the_test_split_and_the_report_is_plain_data():
    learner = task()
    model = learner.build_model()
    with torch.no_grad():
        model.answer.weight.zero_()
        model.answer.bias.copy_(F.one_hot(torch.tensor(3), 10))
    report = learner.report(model, None)
    test = learner.splits.test
    table = torch.tensor(report["confusion_matrix"])
    # It always answers 3, for any image.
    assert table[:, 3].tolist() == test.classes.bincount(minlength=10).tolist()
    assert table.sum() == report["test_images"] == len(test)
    assert report["test_accuracy"] == (test.classes == 3).double().mean().item()
    assert json.loads(json.dumps(report)) == report
    assert "validation_loss" not in report


def test_testing_drops_nothing_out_and_keeps_mode_and_random_state():
    learner = task(dropout=0.9)
    model, images = learner.build_model().train(), learner.splits.test.images
    before = torch.get_rng_state()
    assert torch.equal(answered(model, images), answered(model, images))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_the_loss_is_the_mean_over_images():
    learner = task()
    model, train = learner.build_model().eval(), learner.train_dataset()
    each = [learner.loss(model, [part.unsqueeze(0) for part in train[i]]) for i in range(4)]
    batch = [torch.stack(parts) for parts in zip(*(train[i] for i in range(4)), strict=True)]
    torch.testing.assert_close(learner.loss(model, batch), torch.stack(each).mean())


def test_every_weight_gets_a_gradient_and_there_are_no_buffers():
    learner = task(blocks=3)
    model, train = learner.build_model(), learner.train_dataset()
    learner.loss(model, [train.images[:8], train.classes[:8], None]).backward()
    assert all(weight.grad is not None for weight in model.parameters())
    assert not list(model.buffers())
