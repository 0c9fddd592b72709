"""A site's profile: the account, partition, modules and container that every job there needs.

It lies under the config files and flags, so that a config says what to train and can travel, and the
profile says where and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcrun.config.layers import Layer, file_layer
from hpcrun.config.problems import ConfigError, Problem

VARIABLE = "HPCRUN_PROFILE"
_SECTIONS = ("job", "restarts")


def profile_path(environ: Mapping[str, str], wanted: str | None = None) -> Path | None:
    """The profile that applies, or None.

    ``wanted`` (a flag), else ``$HPCRUN_PROFILE``: a path, or the name of a file in
    ``~/.config/hpcrun`` (``$XDG_CONFIG_HOME/hpcrun``) without its suffix; empty for none. Without
    either, ``default.yaml`` there, or the only profile there is.

    Raises:
        ConfigError: the one that was asked for is not there.
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
    """What to tell where there are several profiles and nothing says which; see :func:`profile_path`.

    The first of them applied as long as it was the only one.
    """
    profiles = _profiles(_folder(environ))
    if wanted is not None or VARIABLE in environ or len(profiles) < 2:
        return None
    if any(profile.stem == "default" for profile in profiles):
        return None
    return (
        f"none of the profiles in {profiles[0].parent} applies ("
        f"{', '.join(profile.stem for profile in profiles)}): choose with --profile or ${VARIABLE}, "
        "or call one default.yaml; --profile '' says that none is fine"
    )


def profile_layer(path: Path) -> Layer:
    """Read a profile; raises ConfigError for one that says anything but where to run."""
    layer = file_layer(path)
    wrong = [
        Problem(
            layer.where.get(key, str(path)),
            key,
            f"a profile says where to run and holds only {' and '.join(_SECTIONS)}; "
            "put this into the config",
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
    there = f"there is: {', '.join(known)}" if known else f"there are none in {folder}"
    raise ConfigError([Problem(place, "", f"no profile {path}; {there}")])
