"""The digits are split once and for all, and a machine without them reports the package to install."""

import sys
from pathlib import Path

import pytest
import torch

from hpcrun.config import Config, ConfigError, locate, override_layer, resolve, with_task_options
from hpcrun.errors import UserError
from hpcrun.tasks import BUILTIN, digits, options_for
from hpcrun.train.task import load_task


def numbers(split: digits.Digits) -> set[int]:
    return set(split.numbers.tolist())


def test_every_digit_is_in_exactly_one_split_of_about_the_size_asked_for():
    parts = digits.splits(0.15, 0.25)
    sets = [numbers(part) for part in (parts.train, parts.validation, parts.test)]
    assert sum(map(len, sets)) == len(set.union(*sets)) == 1797
    assert [len(part) / 1797 for part in sets] == pytest.approx([0.6, 0.15, 0.25], abs=0.03)


def test_another_share_for_one_split_moves_nothing_between_the_others():
    few, many = digits.splits(0.1, 0.2), digits.splits(0.3, 0.2)
    assert numbers(few.test) == numbers(many.test)
    assert numbers(few.validation) < numbers(many.validation)
    assert numbers(many.train) < numbers(few.train)


def test_every_split_has_every_digit():
    for part in vars(digits.splits(0.15, 0.15)).values():
        assert part.classes.unique().tolist() == list(range(10))


def test_an_item_is_the_image_its_class_and_its_number():
    from sklearn.datasets import load_digits

    found = load_digits()
    image, label, number = digits.splits(0.15, 0.15).train[7]
    assert (image.shape, image.dtype, label.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    assert torch.equal(image[0] * 16, torch.tensor(found.images[number], dtype=torch.float32))
    assert label == found.target[number]


@pytest.mark.parametrize("task", ["classifier", "autoencoder"])
def test_without_scikit_learn_one_line_says_what_to_install(
    task: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    loaded = load_task(Config.model_validate({"task": BUILTIN[task]}))
    # Rank 0 prepares; on a node with another environment, opening reports the same.
    for asked in (loaded.prepare, loaded.train_dataset):
        with pytest.raises(UserError, match=r"^data: .*; pip install scikit-learn$") as caught:
            asked()
        assert "\n" not in str(caught.value)


def test_a_split_that_no_digit_falls_into_is_refused():
    with pytest.raises(UserError, match="the test split has no digits"):
        digits.splits(0.15, 1e-9)


def checked(task: str, *overrides: str) -> Config:
    layers = [override_layer([f"task={task}", *overrides])]
    return with_task_options(resolve(layers), options_for(task), locate(layers))


@pytest.mark.parametrize(
    ("task", "override", "line"),
    [
        ("classifier", "data.test_fraction=0.9", "leave nothing to train on"),
        ("classifier", "model.chanels=3", "unknown key; did you mean model.channels?"),
        ("autoencoder", "model.latent=0", "model.latent: should be at least 1, not 0"),
        ("autoencoder", "data.reconstructions=''", "is empty; omit the key, or write null"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(task: str, override: str, line: str):
    with pytest.raises(ConfigError) as caught:
        checked(task, override)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_relative_path_for_reconstructions_is_settled_where_it_was_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    config = checked("autoencoder", "data.reconstructions=digits.h5")
    assert config.data.own["reconstructions"] == str(tmp_path / "digits.h5")
