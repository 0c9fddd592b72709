"""Missing files and modules that another node, or the same node a minute later, may have.

A file server that does not answer, a file system that is not mounted, and a cache on the node's own disk give
the errors of a mistyped path too. The disk shows the difference right after the failure.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

Passing = Literal["", "node", "time"]
"""The reason why a failure may not recur: its node, or its time; empty for no reason."""

# Folders of the node itself, with the variables that name more of them.
_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/local", "/localscratch", "/lscratch")
_LOCAL_VARIABLES = ("TMPDIR", "SLURM_TMPDIR", "LOCAL_SCRATCH")
# Programs of a driver, and devices.
_DRIVER = re.compile(r"^(?:nvidia-smi|rocm-smi|amd-smi|ibstat|ibv_\w+)$|^/(?:dev|proc|sys)/")
# Several ranks write their compiled kernels there at the same time.
_CACHE = re.compile(
    r"/\.(?:cache|triton|nv)/|/torch_?(?:inductor|_?extensions|compile)[\w-]*/|/\.tmp|\.tmp\b"
)
_QUOTED = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"")
_BARE = re.compile(r"(?<![\w.:/])/[^\s'\":,;()\[\]{}<>|]+")
_SYSTEM = re.compile(
    r"Errno (?:2|13|20|21)\b|errno = (?:2|13)\b|No such file|Permission denied|[Nn]ot a directory"
)
_MISSING = re.compile(r"Errno 2\b|errno = 2\b|No such file")
_PROGRAMS = (".sh", ".bash", ".py", ".pl", ".exe", ".out", ".run")
_MODULE = re.compile(r"No module named '?(?P<name>[\w.]+)'?(?P<rest>.*)")
_PACKAGES = re.compile(r'File "(?P<folder>/[^"\n]*?/(?:site|dist)-packages)/')


def path_may_return(message: str, paths: Iterable[str] = ()) -> Passing:
    """Return why the files that ``message`` names may be there at another start; look at the disk.

    Args:
        message: the text of an exception, or the last line of a program.
        paths: the names of the files, if known; they come from the message otherwise.
    """
    named = [path for path in paths if path] or _paths_in(message)
    if any(map(_DRIVER.search, named)):
        return "node"
    if any(map(_CACHE.search, named)):
        return "time"
    known = [Path(path) for path in named if path.startswith("/")]
    of_system = _SYSTEM.search(message)
    try:
        if any(_is_of_node(path, found=not of_system) for path in known):
            return "node"
        all_known = of_system and known and len(known) == len(named)
        missing = bool(_MISSING.search(message))
        return "time" if all_known and all(_is_usable(one, missing) for one in known) else ""
    except OSError:
        # For example ESTALE, EIO or ENOTCONN: the file system does not answer.
        return "node"


def is_there(message: str) -> bool:
    """Return True if this node has the files that ``message`` of another node names."""
    named = _paths_in(message)
    return bool(named) and all(Path(path).exists() for path in named)


def module_may_return(message: str, folders: Iterable[Path]) -> bool:
    """Return True if one of ``folders`` has the module that Python did not find a moment ago.

    Args:
        message: the text of an exception.
        folders: folders of packages from which the program imports.
    """
    found = _MODULE.search(message)
    if not found or "not a package" in found["rest"]:
        return False
    *above, last = found["name"].split(".")
    try:
        return any(
            parent.is_dir() and (_is_package(parent / last) or any(parent.glob(f"{last}.*")))
            for parent in (folder.joinpath(*above) for folder in folders)
        )
    except OSError:
        return True


def folders_of_program(command: Iterable[str], traceback: str, where: str) -> list[Path]:
    """Return the folders from which a Python program imports.

    Args:
        command: the command line of the program.
        traceback: the text of its traceback.
        where: the deepest ``file:line`` of the traceback in the user's code.
    """
    found = {Path(one["folder"]) for one in _PACKAGES.finditer(traceback)}
    for word in command:
        prefix = Path(word).parent.parent
        # Only an environment of its own has packages for exactly one Python.
        if word.startswith("/") and any(
            (prefix / name).exists() for name in ("pyvenv.cfg", "conda-meta")
        ):
            found.update(prefix.glob("lib/python3*/site-packages"))
    if where.startswith("/"):
        found.add(Path(where.rpartition(":")[0]).parent)
    return sorted(found)


def _paths_in(text: str) -> list[str]:
    quoted = [one or other for one, other in _QUOTED.findall(text)]
    of_files = [one for one in quoted if one.startswith("/") or _DRIVER.search(one)]
    if of_files and len(of_files) == len(quoted):
        return of_files
    return of_files or [one.rstrip(".") for one in _BARE.findall(text)]


def _local_roots() -> set[Path]:
    if "SLURM_JOB_ID" not in os.environ:
        # The next start is on this machine too.
        return set()
    given = (os.environ.get(name, "") for name in _LOCAL_VARIABLES)
    return {Path(one) for one in (*_LOCAL, *given) if one.startswith("/")}


def _is_of_node(path: Path, *, found: bool) -> bool:
    """Return True if ``path`` is missing because this node lacks a folder or has another user's.

    Args:
        found: the message does not say that ``path`` is missing, so it may be an empty folder.
    """
    roots = _local_roots()
    # The folder above the first missing part.
    there = next((one for one in (path, *path.parents) if _exists(one)), Path("/"))
    if there in roots:
        return there != path
    status = there.stat()
    if any(root in there.parents for root in roots):
        # For example a cache of another user, who had this name first.
        return status.st_uid not in (os.geteuid(), 0)
    if there == Path("/") or (there == path and not found) or not there.is_dir():
        return False
    # The mount point of a file system that is not mounted.
    on_root = status.st_dev == Path("/").stat().st_dev and status.st_uid == 0
    return on_root and os.access(there, os.R_OK) and not any(there.iterdir())


def _exists(path: Path) -> bool:
    """Return True if ``path`` is there; raises OSError if the file system does not answer."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    return True


def _is_usable(path: Path, missing: bool) -> bool:
    """Return True if ``path`` is there now for this user; raises OSError.

    Args:
        missing: it was missing; otherwise it could not be opened.
    """
    if not _exists(path):
        return False
    if not missing:
        # A program without the right to run is a mistake of the user.
        is_data = path.is_file() and bool(path.suffix) and path.suffix not in _PROGRAMS
        return is_data and os.access(path, os.R_OK)
    if path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        return True
    with path.open("rb") as program:
        first = program.readline(256)
    words = first[2:].split() if first.startswith(b"#!") else []
    return not words or Path(os.fsdecode(words[0])).exists()


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").exists()
