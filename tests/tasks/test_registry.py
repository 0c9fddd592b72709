"""Submitting knows the built-in tasks and their options."""

import importlib

import pytest

from hpcrun.config.tasks import BUILTIN, options_for
from hpcrun.train.task import Task


@pytest.mark.parametrize("short", BUILTIN)
def test_every_built_in_name_leads_to_a_task(short: str):
    module, _, name = BUILTIN[short].partition(":")
    assert issubclass(getattr(importlib.import_module(module), name), Task)
    model, data = options_for(short)
    assert model.model_validate({})
    assert data.model_validate({})


def test_a_users_task_has_no_options_of_ours():
    assert options_for("my_package.my_module:MyTask") is None


def test_an_older_copy_of_an_example_finds_its_names() -> None:
    from hpcrun.tasks.options import BYTES, LanguageModelShape, splits_over_heads

    assert BYTES == 256
    assert splits_over_heads.__module__ == LanguageModelShape.__module__
