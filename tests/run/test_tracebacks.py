"""The place of an error is a line of the user's code, with the original path."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hpcrun.ranks.collective import Ranks
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.endings import headline, place_of, record_failure, traceback_of
from hpcrun.run.files import write_json
from hpcrun.slurm.notation import expand

MODULE = """
import json
import torch
from torch import nn

def read():
    return json.loads("{")

def load():
    return torch.load("/data/imagenet/train.pt")

def chained():
    try:
        read()
    except ValueError as error:
        raise RuntimeError("no labels") from error

def shape():
    return nn.Linear(4, 2)(torch.zeros(3, 5))

class Missing(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return open("/data/%d.npy" % index)

def loader():
    return next(iter(torch.utils.data.DataLoader(Missing(), num_workers=1)))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Make a run with code copied from ``project`` to ``code/001``."""
    found = create(tmp_path / "runs" / "a", "x", {})
    write_json(found.record, {"code": {"root": "code/001", "source": str(tmp_path / "project")}})
    return found


@pytest.fixture
def module(run: RunDirectory) -> ModuleType:
    """Return the user's module, run from the copy."""
    path = run.code / "001" / "src" / "img.py"
    path.parent.mkdir(parents=True)
    path.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("img_of_traces", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules["img_of_traces"] = found
    spec.loader.exec_module(found)
    return found


def raised(work: Callable[[], object]) -> Exception:
    """Return the exception of ``work``, called by code of this package."""
    try:
        Ranks().together(work)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(MODULE.split("\n"), 1) if text in line)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("read", "json.loads"),
        ("load", "torch.load"),
        ("chained", "raise RuntimeError"),
        ("shape", "nn.Linear(4"),
        ("loader", "open("),
    ],
)
def test_the_place_is_the_deepest_line_of_the_user(
    run: RunDirectory, module: ModuleType, tmp_path: Path, name: str, text: str
) -> None:
    error = raised(getattr(module, name))
    line = line_of(text)
    original = tmp_path / "project" / "src" / "img.py"
    copy = run.code / "001" / "src" / "img.py"
    assert place_of(error) == (f"{original}:{line}", f"{copy}:{line}")
    failure = record_failure(tmp_path / "logs", 0, error, None)
    assert (failure.where, failure.copy) == (f"{original}:{line}", f"{copy}:{line}")


def test_frames_of_hpcrun_are_left_out(module: ModuleType, tmp_path: Path) -> None:
    told = traceback_of(raised(module.chained))
    assert "collective.py" not in told
    assert (
        f'File "{tmp_path}/project/src/img.py", line {line_of("raise Runtime")}, in chained' in told
    )
    assert "    raise RuntimeError" in told
    # The same holds for the cause; frames of libraries stay.
    assert f"line {line_of('json.loads')}, in read" in told
    assert "json/decoder.py" in told
    assert "code/001" not in told
    assert told.endswith("RuntimeError: no labels\n")


def test_the_last_frame_of_an_error_in_hpcrun_stays() -> None:
    error = raised(lambda: expand("node[1-"))
    told = traceback_of(error)
    assert "hpcrun/slurm/notation.py" in told
    assert "collective.py" not in told
    # The line of the user's code that made the call.
    assert place_of(error)[0].startswith(__file__)


def test_a_module_with_a_syntax_error_is_the_place(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = (\n")
    error = raised(lambda: compile("x = (\n", str(tmp_path / "broken.py"), "exec"))
    assert place_of(error) == (f"{tmp_path}/broken.py:1", "")


def test_the_headline_of_a_loader_error_is_the_error_itself(module: ModuleType) -> None:
    told = headline(str(raised(module.loader)))
    assert told == (
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/0.npy' "
        "(in DataLoader worker process 0)"
    )
    assert headline("a\nb") == "a"
    assert headline("") == "no message"
