"""Folders that belong to no run: the files that come with the package, and the user's settings.

This base module may be imported by every package.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
HOSTS = "hosts.yaml"
"""The file in the folder of settings that describes the hosts of ``--host``; the others are profiles."""


def shipped(name: str) -> Path:
    """Return the path of the file or folder ``name``, such as ``configs/gpt.yaml``.

    An installed package has the files in its own folder, and a checkout at its top.
    """
    installed = _PACKAGE / name
    return installed if installed.exists() else _PACKAGE.parent / name


def shipped_example(module: str) -> Path | None:
    """Return the file of a module such as ``examples.digits``; None if hpcrun has no such example."""
    package, _, name = module.partition(".")
    file = shipped("examples") / f"{name}.py"
    return file if package == "examples" and name.isidentifier() and file.is_file() else None


def settings_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return ``~/.config/hpcrun``, or that in ``$XDG_CONFIG_HOME``."""
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "hpcrun"
