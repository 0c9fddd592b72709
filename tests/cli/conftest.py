"""Fixtures for the tests of the commands: a folder to submit from, one finished run, and a small disk."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import jobs

TINY = {"job__nodes": 1, "job__gpus": 2, "train__accumulation": 1, "checkpoint__every": 0}


def tiny_config(folder: Path, **changes: object) -> list[str]:
    """Overrides for a job of two ranks and ten steps that computes almost nothing."""
    settings: dict[str, object] = {**TINY, "train__steps": 10, "optim__warmup_steps": 0}
    return jobs.probe_config(folder, **(settings | changes))


def prepare(folder: Path) -> Path:
    """Put the probe task and an empty config into ``folder``."""
    jobs.write_probe(folder)
    (folder / "empty.yaml").write_text("{}\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to submit from."""
    return prepare(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run ``runs/done``. Copy it before you change it."""
    place = prepare(tmp_path_factory.mktemp("finished"))
    done = jobs.hpcrun(
        "submit", "-c", "empty.yaml", "--name", "done", *tiny_config(place), cwd=place
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (place / "output.txt").write_text(done.stdout)
    return place


@pytest.fixture
def finished_copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of the folder of ``finished``, to damage."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Make, or resize, a file system of a given size (``64k``); needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    place = tmp_path / "disk"
    place.mkdir()

    def sized(size: str) -> Path:
        options = f"size={size}" + (",remount" if place.is_mount() else "")
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
        return place

    yield sized
    if place.is_mount():
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def refusable() -> list[str]:
    """Prefix for a command, so that file permissions apply to it; they do not apply to root."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
