"""Every invalid task is refused in one line."""

import importlib
import sys

import pytest
from torch import nn

import hpcrun
from hpcrun.config import override_layer, resolve
from hpcrun.errors import NotTrainable, UserError
from hpcrun.train.task import Task, load_task

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


def test_a_task_gets_the_config(load):
    task = load(GOOD)
    assert isinstance(task, hpcrun.Task)
    assert task.config.seed == 4


def test_a_minimal_task_is_enough(load):
    task = load(GOOD)
    task.prepare()
    assert task.validation_dataset() is None
    assert task.report(nn.Linear(1, 1), None) == {}
    assert (task.unit, task.units_per_sample) == ("samples", 1)


def test_a_missing_module_is_refused(load):
    assert "importing it raised ModuleNotFoundError: No module named 'absent'" in line_of(
        load, GOOD, "absent:Mine"
    )


def test_a_module_that_lacks_another_module_says_where(load, tmp_path):
    line = line_of(load, "\nimport absent_too\n" + GOOD)
    assert "No module named 'absent_too'" in line
    assert line.endswith(f"({tmp_path / 'written.py'}:2)")


def test_a_missing_class_is_refused(load):
    assert line_of(load, GOOD, "written:Other") == (
        "written has no Other; name one of its Task classes"
    )


def test_a_module_that_raises_says_what_and_where(load, tmp_path):
    line = line_of(load, "import os\nos.environ['NO SUCH VARIABLE']\n")
    where = tmp_path / "written.py"
    assert line == f"importing it raised KeyError: 'NO SUCH VARIABLE' ({where}:2)"


def test_an_attribute_error_inside_the_module_is_not_taken_for_a_missing_class(load, tmp_path):
    line = line_of(load, GOOD + "\nMine.nothing\n")
    assert line.startswith("importing it raised AttributeError: ")
    assert line.endswith(f"({tmp_path / 'written.py'}:9)")


def test_a_module_with_a_syntax_error_says_the_line(load):
    line = line_of(load, "def broken(:\n")
    assert line.startswith("importing it raised SyntaxError: ")
    assert "written.py, line 1" in line


def test_a_script_that_exits_when_it_is_imported_is_no_success(load):
    assert line_of(load, "import sys\nsys.exit(0)\n").startswith(
        "importing it raised SystemExit: 0"
    )


def test_an_object_that_is_not_a_task_class_is_refused(load):
    for source in ("class Mine: ...", "def Mine(config): ...", "Mine = 3"):
        assert (
            line_of(load, source) == "is not a subclass of hpcrun.Task; derive it from hpcrun.Task"
        )


def test_a_task_without_a_loss(load):
    line = line_of(load, GOOD.replace("def loss", "def lost"))
    assert line.startswith("the constructor raised TypeError: ")
    assert "loss" in line


def test_a_method_that_is_no_function_is_refused(load):
    assert line_of(load, GOOD + "    loss = None\n") == "loss is None; write it as a method"
    assert line_of(load, GOOD + "    collate = 3\n") == "collate is 3; write it as a method"


def test_a_task_whose_constructor_raises_says_where(load, tmp_path):
    constructor = "    def __init__(self, config):\n        super().__init__(config)\n"
    line = line_of(load, GOOD + constructor + "        [][config.seed]\n")
    assert line.startswith("the constructor raised IndexError: list index out of range")
    assert line.endswith(f"({tmp_path / 'written.py'}:10)")


def test_a_text_of_several_lines_becomes_one(load):
    line = line_of(load, "raise ValueError('first\\n  second')")
    assert "ValueError: first second" in line


def test_a_task_s_own_refusal_passes_unchanged(load):
    refuse = (
        "    def __init__(self, config):\n"
        "        from hpcrun.errors import UserError\n"
        "        raise UserError('model.width: at least 3')\n"
    )
    with pytest.raises(UserError, match=r"^model.width: at least 3$"):
        load(GOOD + refuse)


def test_a_name_without_a_class():
    config = resolve([override_layer(["task=language-model"])])
    with pytest.raises(UserError, match=r"^task: language-model: write it as module:Class$"):
        load_task(config)


def test_a_task_cannot_be_made_of_the_base_class_alone():
    with pytest.raises(TypeError, match="abstract"):
        Task(resolve([]))


def test_a_task_that_sets_its_step_is_refused_with_a_remedy(load):
    begin = "    def __init__(self, config):\n        self.step = 0\n"
    with pytest.raises(
        NotTrainable, match="Mine sets step, which hpcrun uses for the number of steps"
    ):
        load(GOOD + begin)
