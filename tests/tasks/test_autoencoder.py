"""The autoencoder's loss is the bound that it claims, and a resume repeats its random draws."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributions import Normal, kl_divergence

from hpcrun.config import Config
from hpcrun.tasks.autoencoder import Autoencoder, bound, independent_pixels, picture


def task(**data: object) -> Autoencoder:
    values = {"seed": 3, "model": {"hidden": 96, "latent": 8}, "data": data}
    return Autoencoder(Config.model_validate(values))


def batch(learner: Autoencoder, count: int = 6) -> list[torch.Tensor]:
    train = learner.train_dataset()
    return [torch.stack(parts) for parts in zip(*(train[i] for i in range(count)), strict=True)]


def test_the_bound_is_the_binomial_likelihood_and_the_divergence_of_the_code():
    generator = torch.Generator().manual_seed(1)
    ink = torch.randint(0, 17, (3, 1, 8, 8), generator=generator)
    logits = torch.randn(3, 64, generator=generator)
    mean, log_variance = torch.randn(2, 3, 5, generator=generator)
    parts = bound(ink / 16, logits, mean, log_variance)
    likelihood = stats.binom.logpmf(ink.flatten(1).numpy(), 16, logits.sigmoid().numpy()).sum(-1)
    np.testing.assert_allclose(parts.pixels.numpy(), -likelihood, rtol=1e-5)
    code = Normal(mean, (0.5 * log_variance).exp())
    torch.testing.assert_close(parts.code, kl_divergence(code, Normal(0.0, 1.0)).sum(-1))


def test_a_batch_costs_the_mean_of_its_images():
    learner = task()
    model, whole = learner.build_model().eval(), batch(learner)
    each = [learner.loss(model, [part[i : i + 1] for part in whole]) for i in range(6)]
    torch.testing.assert_close(learner.loss(model, whole), torch.stack(each).mean())


def test_training_draws_from_the_global_generator_that_a_resume_restores():
    learner = task()
    model, whole = learner.build_model().train(), batch(learner)
    state = torch.get_rng_state()
    first, second = learner.loss(model, whole), learner.loss(model, whole)
    torch.set_rng_state(state)
    assert torch.equal(learner.loss(model, whole), first)
    assert not torch.equal(first, second)


def test_validation_draws_nothing_and_gives_each_image_the_same_code_every_time():
    learner = task()
    model, whole = learner.build_model().eval(), batch(learner)
    before = torch.get_rng_state()
    first = learner.loss(model, whole)
    assert torch.equal(torch.get_rng_state(), before)
    turned = [part.flip(0) for part in whole]
    torch.testing.assert_close(learner.loss(model, turned), first)


def test_it_learns_to_pack_digits_better_than_pixel_by_pixel(tmp_path: Path):
    torch.manual_seed(0)
    place = tmp_path / "new" / "digits.h5"
    learner = task(reconstructions=str(place))
    model, train = learner.build_model(), learner.train_dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        for part in torch.randperm(len(train)).split(64):
            optimizer.zero_grad()
            learner.loss(model, [train.images[part], None, train.numbers[part]]).backward()
            optimizer.step()
    before = torch.get_rng_state()
    report = learner.report(model, 1.5)
    assert torch.equal(torch.get_rng_state(), before)
    assert report["test_loss"] < report["independent_pixels"]
    assert report["test_loss"] == pytest.approx(report["test_pixels"] + report["test_code"])
    assert json.loads(json.dumps(report)) == report
    with h5py.File(place) as file:
        images, shown = file["images"][...], file["reconstructions"][...]
        assert file["codes"].shape == (len(images), 8)
    assert np.square(images - shown).mean() == pytest.approx(report["test_squared_error"], rel=1e-4)
    assert [entry.name for entry in place.parent.iterdir()] == ["digits.h5"]


def test_independent_pixels_cost_what_their_smoothed_frequencies_say():
    train = torch.tensor([0.0, 0.0, 1.0]).view(3, 1, 1, 1)
    test = torch.tensor([0.0, 0.5]).view(2, 1, 1, 1)
    expected = -(np.log(3 / 20) + np.log(1 / 20)) / 2
    assert independent_pixels(train, test) == pytest.approx(expected, abs=1e-12)


def test_the_picture_has_the_images_above_what_came_back():
    images, shown = torch.zeros(2, 1, 8, 8), torch.ones(2, 1, 8, 8)
    lines = picture(images, shown).splitlines()
    assert lines[:8] == [""] * 8
    assert lines[9:] == ["@" * 32] * 8


def test_every_weight_gets_a_gradient():
    learner = task()
    model = learner.build_model()
    learner.loss(model, batch(learner)).backward()
    assert all(weight.grad is not None for weight in model.parameters())
