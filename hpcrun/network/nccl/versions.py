"""Versions of the libraries: compared as numbers, and found without importing them."""

import re
from importlib import metadata

_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def version_key(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparing: ``2.30.7-1`` becomes (2, 30, 7)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("-")[0].split("+")[0]))


def is_version(text: str) -> bool:
    """Return True if ``text`` is a version such as 2.27 or 2.27.5."""
    return re.fullmatch(r"\d+\.\d+(\.\d+)?(-\d+)?", text) is not None


def installed_nccl() -> str | None:
    """Return the version of the NCCL wheel of this Python; None if there is none."""
    for wheel in _WHEELS:
        try:
            return metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    return None


def installed_torch() -> str | None:
    """Return the version of this Python's torch without importing torch; None if there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
