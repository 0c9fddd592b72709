"""Files that belong to no run: those that come with the package, the user's settings, and the site's.

This base module may be imported by every package.
"""

import os
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
HOSTS = "hosts.yaml"
"""The file in the folder of settings that describes the hosts of ``--host``; the others are profiles."""
SITE = "HPCRUN_SITE"
PROFILE = "HPCRUN_PROFILE"
SITE_FILE = Path("/etc/hpcrun/site.yaml")


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


def has_site(environ: Mapping[str, str]) -> bool:
    """Return True if this machine or ``environ`` names a site's file."""
    return SITE in environ or SITE_FILE.exists()


def has_profile(environ: Mapping[str, str]) -> bool:
    """Return True if ``environ`` names a profile, or the user has a default profile."""
    return PROFILE in environ or default_profile(environ).is_file()


def default_profile(environ: Mapping[str, str]) -> Path:
    """Return the path of the profile that applies without a choice."""
    return settings_folder(environ) / "default.yaml"
