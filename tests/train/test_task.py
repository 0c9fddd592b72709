"""Every invalid task is refused in one line."""

import importlib
import sys

import pytest
from torch import nn

import hpcrun
from hpcrun.config import override_layer, resolve
from hpcrun.errors import NotTrainable, UserError
from hpcrun.train.task import load_task

GOOD = """
from hpcrun import Task

class Mine(Task):
    def build_model(self): ...
    def train_dataset(self): ...
    def loss(self, model, batch): ...
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that writes a module, and loads a task from it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write_and_load(source, task="written:Mine"):
        (tmp_path / "written.py").write_text(source)
        sys.modules.pop("written", None)
        importlib.invalidate_caches()
        return load_task(resolve([override_layer([f"task={task}", "seed=4"])]))

    yield write_and_load
    sys.modules.pop("written", None)


def line_of(load, source, task="written:Mine"):
    with pytest.raises(UserError) as caught:
        load(source, task)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"task: {task}: ")
    return line.removeprefix(f"task: {task}: ")


def test_a_minimal_task_is_enough(load):
    task = load(GOOD)
    assert isinstance(task, hpcrun.Task)
    assert task.config.seed == 4
    task.prepare()
    assert task.validation_dataset() is None
    assert task.report(nn.Linear(1, 1), None) == {}
    assert (task.unit, task.units_per_sample) == ("samples", 1)


CONSTRUCTOR = """
    def __init__(self, config):
        super().__init__(config)
        [][config.seed]
"""
NO_TASK = "is not a subclass of hpcrun.Task; derive it from hpcrun.Task"


@pytest.mark.parametrize(
    ("source", "task", "begin", "end"),
    [
        (
            GOOD,
            "absent:Mine",
            "importing it raised ModuleNotFoundError: No module named 'absent'",
            "",
        ),
        ("\nimport absent_too\n", "written:Mine", "importing it raised Module", "/written.py:2)"),
        (GOOD, "written:Other", "written has no Other; name one of its Task classes", ""),
        # Not taken for a missing class.
        (
            GOOD + "\nMine.nothing\n",
            "written:Mine",
            "importing it raised AttributeError: ",
            "/written.py:9)",
        ),
        ("def broken(:\n", "written:Mine", "importing it raised SyntaxError: ", "line 1)"),
        # No success.
        ("import sys\nsys.exit(0)\n", "written:Mine", "importing it raised SystemExit: 0", ""),
        (GOOD, "language-model", "write it as module:Class", ""),
        ("class Mine: ...", "written:Mine", NO_TASK, ""),
        ("Mine = 3", "written:Mine", NO_TASK, ""),
        (
            GOOD.replace("def loss", "def lost"),
            "written:Mine",
            "the constructor raised TypeError: ",
            "",
        ),
        (GOOD + "    loss = None\n", "written:Mine", "loss is None; write it as a method", ""),
        (
            GOOD + CONSTRUCTOR,
            "written:Mine",
            "the constructor raised IndexError: list index out of range",
            "/written.py:11)",
        ),
        (
            "raise ValueError('first\\n  second')",
            "written:Mine",
            "importing it raised ValueError: first second",
            "",
        ),
    ],
)
def test_an_invalid_task_is_refused_in_one_line(load, source, task, begin, end):
    line = line_of(load, source, task)
    assert line.startswith(begin)
    assert end in line


def test_a_task_s_own_refusal_passes_unchanged(load):
    refuse = (
        "    def __init__(self, config):\n"
        "        from hpcrun.errors import UserError\n"
        "        raise UserError('model.width: at least 3')\n"
    )
    with pytest.raises(UserError, match=r"^model.width: at least 3$"):
        load(GOOD + refuse)


def test_a_task_that_sets_its_step_is_refused(load):
    begin = "    def __init__(self, config):\n        self.step = 0\n"
    with pytest.raises(
        NotTrainable, match="Mine sets step, which hpcrun uses for the number of steps"
    ):
        load(GOOD + begin)
