"""Submitting knows the built-in tasks and their options without importing torch."""

import importlib
import subprocess
import sys

import pytest

from hpcrun.tasks import BUILTIN, options_for
from hpcrun.train.task import Task


def test_looking_up_options_imports_neither_torch_nor_numpy_nor_h5py():
    code = (
        "import sys; from hpcrun.tasks import options_for; assert options_for('language-model');"
        "print([name for name in ('torch', 'numpy', 'h5py') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("short", BUILTIN)
def test_every_built_in_name_leads_to_a_task(short: str):
    module, _, name = BUILTIN[short].partition(":")
    assert issubclass(getattr(importlib.import_module(module), name), Task)
    model, data = options_for(short)
    assert model.model_validate({})
    assert data.model_validate({})


def test_a_users_task_has_no_options_of_ours():
    assert options_for("my_package.my_module:MyTask") is None
