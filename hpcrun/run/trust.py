"""The trust of a job in its run directory: the folder is this user's, and the config is what was submitted.

Who may write to a parent folder without the sticky bit can rename a run directory, which has mode 700, and
put another folder in its place (a project folder of mode 2770). The commands in that folder's config would
run as the user of the job. So a job opens the folder first, and checks the owner of what it has opened.
"""

import contextlib
import grp
import itertools
import json
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hpcrun.run.directory import RunDirectory, RunError, is_own, owner_name
from hpcrun.run.files import digest_of, open_regular, without_hash
from hpcrun.run.snapshot import Snapshot

SUBMITTED = "HPCRUN_SUBMITTED"
"""Variable of the ranks with the digest of the submitted config."""
_LARGEST = 1 << 20
"""Bytes of a config that are read, as hpcrun/config/layers.py does; one more shows that there are more."""
_MOST_LOOKED_AT = 1000


class ForeignRun(RunError):
    """A run directory, or a file in it, is of another user or is not what was submitted."""


def own_config(run: RunDirectory, submitted: str | None = None) -> bytes:
    """Return the content of the run's config after the check of its owner.

    A config that the user has edited passes where no other user can replace it.

    Args:
        run: the run directory.
        submitted: the digest of the submitted config; None or empty: not known.

    Raises:
        ForeignRun: the folder or the file belongs to another user, or is not what was submitted.
        OSError: the folder or the file cannot be opened.
    """
    folder = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _require_own(os.fstat(folder), run.path)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(run.config.name, flags, dir_fd=folder), "rb") as file:  # noqa: PTH123
            status = os.fstat(file.fileno())
            _require_own(status, run.config)
            if not stat.S_ISREG(status.st_mode):
                raise ForeignRun(f"{run.config}: is not a regular file; remove it")
            content = file.read(_LARGEST + 1)
    finally:
        os.close(folder)
    if submitted and digest_of(content) != submitted and (shared := replaceable(run.config)):
        raise ForeignRun(
            f"{run.config}: is not the config that was submitted, and other users can rename folders in "
            f"{shared}; look at the config, then continue with `hpcrun resume {run.path}`"
        )
    return content


def require_own_folder(folder: Path) -> None:
    """Refuse a folder of another user in the place of a run's folder.

    Raises:
        ForeignRun: with the remedy.
        OSError: the folder is gone.
    """
    _require_own(folder.stat(), folder)


def require_own_code(snapshot: Snapshot) -> None:
    """Refuse a copy of the code that belongs to another user, or that has files of another user.

    Only in a copy to which others can write are all files looked at: hpcrun makes it with mode 700.

    Raises:
        ForeignRun: with the remedy.
        OSError: the folder is gone.
    """
    status = snapshot.root.stat()
    _require_own(status, snapshot.root)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        for folder, folders, files in os.walk(snapshot.root):
            for name in (*folders, *files):
                path = Path(folder, name)
                _require_own(path.lstat(), path)


def _require_own(status: os.stat_result, path: Path) -> None:
    if not is_own(status, path):
        raise ForeignRun(
            f"{path}: belongs to {owner_name(status.st_uid)}, and commands in it would run as you; somebody "
            "may have replaced your run; if you trust the owner, copy the folder with `cp -r`, and continue "
            "the copy"
        )


def fixed_script(path: Path, content: bytes) -> tuple[Path, BinaryIO | None]:
    """Return a path from which sbatch reads ``content``, although others may replace the file at ``path``.

    Returns:
        ``path`` itself if no other user can replace it; else a file in memory, which the caller keeps open.
    """
    if replaceable(path) is None:
        return path, None
    descriptor = os.memfd_create("hpcrun script", os.MFD_CLOEXEC)
    kept = os.fdopen(descriptor, "w+b", buffering=0)
    kept.write(content)
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}"), kept


def own_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of this user, as ``read_json`` does; None without a file.

    Raises:
        ForeignRun: it belongs to another user.
        OSError: it cannot be read.
    """
    try:
        value = json.loads(own_content(path))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return without_hash(value) if isinstance(value, dict) else None


def own_content(path: Path) -> bytes:
    """Return the content of a file of this user.

    Raises:
        ForeignRun: it belongs to another user.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        _require_own(os.fstat(file.fileno()), path)
        return file.read()


def replaceable(path: Path) -> Path | None:
    """Return a folder in which others may rename what leads to ``path``; None without such a folder.

    These are folders with write access for a group or for everybody, and without the sticky bit. A group
    with no member but this user counts as this user.
    """
    for folder in _folders(path):
        with contextlib.suppress(OSError):
            status = folder.stat()
            if _is_shared(status):
                return folder
    return None


def shared_parent_line(path: Path) -> str | None:
    """Return a line about the first run of this user in a folder in which others may rename it.

    Args:
        path: the new run directory, or the new folder of a sweep.
    """
    shared = replaceable(path)
    if shared is None or _has_own_folder(path):
        return None
    mode = f"{stat.S_IMODE(shared.stat().st_mode):04o}"
    return (
        f"{shared}: other users can rename your runs in it (mode {mode}): a job refuses a folder of another "
        f"user in the place of its run, and ends; its owner prevents this with `chmod +t {shared}`"
    )


def _has_own_folder(path: Path) -> bool:
    """Return True if another folder next to ``path`` is this user's: the line was printed then."""
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in itertools.islice(entries, _MOST_LOOKED_AT):
            if entry.name != path.name and not entry.name.startswith("."):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                    return True
    return False


def _folders(path: Path) -> Iterator[Path]:
    """Yield the folders that the kernel looks up for ``path``, as spelled and without links."""
    spelled, real = path.absolute(), Path(os.path.realpath(path))
    yield from dict.fromkeys([*spelled.parents, *real.parents])


def _is_shared(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_ISVTX:
        return False
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid)


def _is_private(group: int) -> bool:
    """Return True for root's group, and for a group that many systems make for each user."""
    if group == 0:
        return True
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    mine = (user.pw_gid, user.pw_name) == (group, found.gr_name)
    return mine and set(found.gr_mem) <= {user.pw_name}
