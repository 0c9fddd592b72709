"""The files that come with the package: batch scripts, configs, examples and the documentation.

This base module may be imported by every package.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shipped(name: str) -> Path:
    """Return the path of the file or folder ``name``, such as ``configs/gpt.yaml``.

    An installed package has the files in its own folder, and a checkout at its top.
    """
    installed = _PACKAGE / name
    return installed if installed.exists() else _PACKAGE.parent / name
