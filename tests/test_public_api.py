"""The public names of the package, and the cost of importing them."""

import builtins
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcrun
from hpcrun.ranks.signals import StopFlag

ROOT = Path(__file__).parents[1]
NOT_BY_STAR = {"DistributedSampler", "FSDP", "open"}
NAMES = {*hpcrun.__all__, *NOT_BY_STAR}
# Of entry points, which have hpcrun's name.
GROUPS = ("commands", "sinks", "node_checks", "strategies", "tasks")


def test_every_public_name_is_there_and_listed():
    assert set(dir(hpcrun)) >= NAMES
    for name in NAMES - {"STOP", "open"}:
        assert getattr(hpcrun, name).__name__ == name
    assert isinstance(hpcrun.STOP, StopFlag)
    assert hpcrun.open.__name__ == "open_run"
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8").partition("## Names")[2]
    listed = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(listed))) == NAMES


def test_an_import_of_all_names_replaces_no_known_name() -> None:
    packages = [hpcrun, importlib.import_module("hpcrun.config")]
    packages += [
        importlib.import_module(f"hpcrun.{name}") for name in ("slurm", "train.step.trainer")
    ]
    for package in packages:
        assert not {*package.__all__} & {*dir(builtins)}, package.__name__
    names: dict[str, object] = dict.fromkeys(NOT_BY_STAR)
    exec("from hpcrun import *", names)
    assert {*hpcrun.__all__} <= {*names}
    assert not any(names[one] for one in NOT_BY_STAR)
    assert hpcrun.open.__name__ == "open_run"


def test_importing_the_submit_module_keeps_the_submit_function() -> None:
    program = (
        "import hpcrun.submit, hpcrun; from hpcrun import submit;"
        "assert hpcrun.submit is submit; help(submit)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "overrides" in done.stdout


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_the_pages_import_from_the_public_modules_only(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    imported = re.findall(
        r"^\s*(?:from|import) (hpcrun[\w.]*)(?: import (\([^)]*\)|.*))?", text, re.M
    )
    for module, names in imported:
        if module.startswith("hpcrun.integrations."):
            # Not imported here: it needs the framework.
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
            continue
        assert module in ("hpcrun", "hpcrun.config", "hpcrun.ports")
        known = vars(importlib.import_module(module))["__all__"]
        assert set(re.findall(r"\w+", names)) <= {
            *known,
            *(NOT_BY_STAR if module == "hpcrun" else ()),
        }
    for name in re.findall(r"`hpcrun\.(\w+)[(`]", text):
        assert name in {*NAMES, "config", "ports", *GROUPS}
    # A module that is run as a command is no import.
    deep = r"(?<!-m )hpcrun\.(?:train|checkpoint|lifecycle|cluster|run|launch|tasks|api|cli|results)\.\w+"
    assert not re.findall(deep, text)


def test_a_missing_name_is_an_ordinary_attribute_error():
    with pytest.raises(AttributeError, match="module 'hpcrun' has no attribute 'Trainer'"):
        _ = hpcrun.Trainer  # type: ignore[attr-defined]


def test_torch_is_imported_only_when_a_name_needs_it() -> None:
    program = """
import sys
import hpcrun
slow = {"torch", "numpy", "pydantic", "h5py", "submitit"}
assert not slow & set(sys.modules), slow & set(sys.modules)
hpcrun.submit, hpcrun.open, hpcrun.Run
assert not {"torch", "numpy", "h5py", "submitit"} & set(sys.modules)
hpcrun.DistributedConfig, hpcrun.AMPConfig, hpcrun.Task
assert "torch" not in sys.modules
from hpcrun import setup_distributed, get_rank
assert "torch" in sys.modules
assert get_rank() == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_single_process_is_rank_0_without_a_group() -> None:
    import torch.distributed as dist

    described = hpcrun.setup_distributed(hpcrun.DistributedConfig())
    assert (described.rank, described.world_size) == (0, 1)
    assert not dist.is_initialized()
    assert (hpcrun.get_rank(), hpcrun.get_world_size(), hpcrun.is_main_process()) == (0, 1, True)
    hpcrun.cleanup_distributed()
