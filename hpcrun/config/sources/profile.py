"""A site's profile: account, partition, modules and container for all jobs of the site.

A profile is the lowest layer, below config files and flags. A config can then move between sites: the config
says what to train, and the profile says where.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcrun.config.problems import ConfigError, Problem
from hpcrun.config.sources.layers import Layer, file_layer

VARIABLE = "HPCRUN_PROFILE"
_SECTIONS = ("job", "restarts")


def profile_path(environ: Mapping[str, str], wanted: str | None = None) -> Path | None:
    """Return the path of the site profile that applies, or None.

    Without a choice, ``default.yaml`` in ``~/.config/hpcrun`` (``$XDG_CONFIG_HOME/hpcrun``) applies, or the
    only profile in this folder.

    Args:
        environ: the environment, with ``HPCRUN_PROFILE``.
        wanted: the value of ``--profile``; None: ``$HPCRUN_PROFILE``. The value is a path, the name of a file
            in the folder without suffix, or empty for no profile.

    Raises:
        ConfigError: the chosen profile does not exist.
    """
    folder = _folder(environ)
    asked = wanted if wanted is not None else environ.get(VARIABLE)
    if asked is not None:
        return _named(asked, folder, "--profile" if wanted is not None else f"${VARIABLE}")
    profiles = _profiles(folder)
    default = folder / "default.yaml"
    if default in profiles:
        return default
    return profiles[0] if len(profiles) == 1 else None


def undecided(environ: Mapping[str, str], wanted: str | None = None) -> str | None:
    """Return a hint if there are several profiles and no choice, otherwise None.

    A second profile ends the automatic choice of the first profile, so the user must know. The arguments
    ``environ`` and ``wanted`` are those of :func:`profile_path`.
    """
    profiles = _profiles(_folder(environ))
    if wanted is not None or VARIABLE in environ or len(profiles) < 2:
        return None
    if any(profile.stem == "default" for profile in profiles):
        return None
    return (
        f"none of the profiles in {profiles[0].parent} applies ("
        f"{', '.join(profile.stem for profile in profiles)}): choose with --profile or ${VARIABLE}, "
        "or rename one to default.yaml; --profile '' chooses none"
    )


def profile_layer(path: Path) -> Layer:
    """Read the profile ``path``.

    Raises:
        ConfigError: the file cannot be read, or has other sections than ``job`` and ``restarts``.
    """
    layer = file_layer(path)
    wrong = [
        Problem(
            layer.where.get(key, str(path)),
            key,
            f"a profile says where to run and may only contain {' and '.join(_SECTIONS)}; "
            "move this key to the config",
        )
        for key in layer.values
        if key not in _SECTIONS
    ]
    if wrong:
        raise ConfigError(wrong)
    return layer


def _folder(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "hpcrun"


def _profiles(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.yaml")) if folder.is_dir() else []


def _named(asked: str, folder: Path, place: str) -> Path | None:
    if not asked:
        return None
    path = Path(asked).expanduser() if "/" in asked or "." in asked else folder / f"{asked}.yaml"
    if path.is_file():
        return path
    known = [profile.stem for profile in _profiles(folder)]
    there = f"available: {', '.join(known)}" if known else f"{folder} has no profiles"
    raise ConfigError([Problem(place, "", f"no profile {path}; {there}")])
