"""The import path of a copy: modules of an editable install also come from the copy."""

import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from hpcrun.run.import_path import copied_path, folders, folders_of


def test_the_folders_of_an_import_hook_contain_its_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = folders()
    # The name and the content are those of setuptools.
    finder = ModuleType("__editable___mine_0_1_finder")
    finder.__dict__["MAPPING"] = {
        "mine": "/project/src/mine",
        "of.space": "/project/lib/of/space",
        "single": "/project/one/single.py",
        "renamed": "/project/other",
    }
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    assert [folder for folder in folders() if folder not in before] == [
        "/project/src",
        "/project/lib",
        "/project/one",
    ]


def test_another_python_is_asked_for_its_own_folders(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    source = tmp_path / "work" / "src"
    source.mkdir(parents=True)
    (packages / "mine.pth").write_text(f"{source}\n")
    found = folders_of(str(tmp_path / "bin" / "python3"))
    assert str(source) in found
    assert sysconfig.get_path("purelib") not in found


def test_a_copy_comes_right_before_its_original() -> None:
    copies = {Path("/project/src"): Path("/copy/src"), Path("/project/lib"): Path("/copy/lib")}
    path = copied_path(
        ["/else", "/project/src", "/lib"], ["/project/src", "/project/lib", "/other"], copies.get
    )
    assert path == ["/else", "/copy/src", "/project/src", "/lib", "/copy/lib", "/project/lib"]
