"""Libraries that a program of this checkout needs and its Python lacks, from a separate folder.

The environment with torch often belongs to the site: a module or a container. This module does not
change it. It installs missing libraries once, in the versions of constraints.txt, below the user's
cache. The module needs the standard library only.
"""

import hashlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"

TRAINING = {
    "numpy": "numpy>=1.26",
    "orjson": "orjson>=3.9",
    "pydantic": "pydantic>=2.7",
    "tqdm": "tqdm>=4.66",
    "xxhash": "xxhash>=3.4",
    "yaml": "pyyaml>=6.0",
}
"""Imports of hpcrun's trainer and checkpoints besides torch: each module, and its requirement."""

_HASTY = {
    # A site's settings for user installations conflict with --target.
    "PIP_USER": "0",
    "PIP_REQUIRE_VIRTUALENV": "0",
    # In a network that drops packets, pip's default timeouts take many minutes.
    "PIP_RETRIES": "1",
    "PIP_TIMEOUT": "20",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
}


class Unavailable(Exception):
    """A missing library that cannot be installed; the text is one line with the remedy."""


def lacking(wanted: Mapping[str, str]) -> list[str]:
    """Return the requirements of ``wanted`` (module -> ``name>=version``) that this Python does not meet."""
    return [needs for module, needs in wanted.items() if not _is_met(module, needs)]


def provide(wanted: Mapping[str, str]) -> Path | None:
    """Return a folder for PYTHONPATH with the missing libraries, or None if none is missing.

    Raises:
        Unavailable: a library could not be installed.
    """
    absent = lacking(wanted)
    if not absent:
        return None
    # Each Python, set of versions and set of missing libraries has its own folder.
    digest = hashlib.sha256(CONSTRAINTS.read_bytes() + " ".join(absent).encode()).hexdigest()[:12]
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    folder = _cache() / "hpcrun" / "libraries" / f"{abi}-{digest}"
    if not folder.is_dir():
        names = ", ".join(_name(needs) for needs in absent)
        print(f"installing {names} into {folder} (once)", file=sys.stderr, flush=True)
        try:
            _install(absent, folder)
        except (OSError, _Refused) as error:
            by_hand = f"{shlex.quote(sys.executable)} -m pip install {shlex.join(absent)}"
            raise Unavailable(
                f"{names} cannot be installed into {folder} ({error}); where there is a network: {by_hand}"
            ) from None
    return folder


class _Refused(Exception):
    """An error of pip or venv."""


def _is_met(module: str, needs: str) -> bool:
    if find_spec(module) is None:
        return False
    name, _, least = needs.partition(">=")
    try:
        return _numbers(metadata.version(name)) >= _numbers(least)
    except metadata.PackageNotFoundError:
        return True  # installed without metadata: an import that works must suffice


def _name(needs: str) -> str:
    return needs.partition(">=")[0]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _install(requirements: list[str], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as work:
        new = Path(work) / "libraries"
        run(
            [
                *pip_command(Path(work) / "pip"), "install", "--quiet", "--target", str(new),
                "--only-binary", ":all:", "--constraint", str(CONSTRAINTS), *requirements,
            ]
        )  # fmt: skip
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has installed the same folder
                raise


def pip_command(spare: Path) -> list[str]:
    """Return this Python's pip, or the pip of an environment made at ``spare``."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    run([sys.executable, "-m", "venv", str(spare)])
    return [str(spare / "bin" / "python"), "-m", "pip"]


def run(command: list[str]) -> None:
    """Run a command of pip or venv, with its last error as the reason of a refusal."""
    done = subprocess.run(
        command, env=os.environ | _HASTY, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said
        which = " ".join(command[1:3])
        raise _Refused(errors[-1] if errors else f"{which} ended with {done.returncode}")
