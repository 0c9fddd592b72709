"""What a program of this checkout needs and the Python that runs it lacks, from a folder of its own.

The environment that torch comes from is often somebody else's: a module of the site, or a container.
Nothing is put into it. What lacks is installed once, in the versions of constraints.txt, below the
user's cache. This module needs the standard library alone.
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
    "pydantic": "pydantic>=2.7",
    "xxhash": "xxhash>=3.4",
    "yaml": "pyyaml>=6.0",
}
"""What hpcrun's trainer and its checkpoints import besides torch: each module, and where it comes from."""

_HASTY = {
    # A site's settings for its users' own installations, which do not go with a folder of our choice.
    "PIP_USER": "0",
    "PIP_REQUIRE_VIRTUALENV": "0",
    # Where the network swallows what is sent, pip's own patience is many minutes.
    "PIP_RETRIES": "1",
    "PIP_TIMEOUT": "20",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
}


class Unavailable(Exception):
    """A library lacks and cannot be installed; the text is one line that says what to do."""


def lacking(wanted: Mapping[str, str]) -> list[str]:
    """Those requirements of ``wanted`` (module -> ``name>=version``) that this Python does not meet."""
    return [needs for module, needs in wanted.items() if not _is_met(module, needs)]


def provide(wanted: Mapping[str, str]) -> Path | None:
    """A folder for PYTHONPATH with what of ``wanted`` lacks here, or None where nothing does.

    Raises:
        Unavailable: it could not be installed.
    """
    absent = lacking(wanted)
    if not absent:
        return None
    # Another Python, other versions or other gaps: another folder.
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
    """What pip or venv said."""


def _is_met(module: str, needs: str) -> bool:
    if find_spec(module) is None:
        return False
    name, _, least = needs.partition(">=")
    try:
        return _numbers(metadata.version(name)) >= _numbers(least)
    except metadata.PackageNotFoundError:
        return True  # it was put there without its record: what can be imported has to do


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
        _run(
            [
                *_pip(Path(work) / "pip"), "install", "--quiet", "--target", str(new),
                "--only-binary", ":all:", "--constraint", str(CONSTRAINTS), *requirements,
            ]
        )  # fmt: skip
        try:
            new.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and has the same
                raise


def _pip(spare: Path) -> list[str]:
    """This Python's pip; where it has none, that of an environment made at ``spare``."""
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    _run([sys.executable, "-m", "venv", str(spare)])
    return [str(spare / "bin" / "python"), "-m", "pip"]


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, env=os.environ | _HASTY, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said
        which = " ".join(command[1:3])
        raise _Refused(errors[-1] if errors else f"{which} ended with {done.returncode}")
