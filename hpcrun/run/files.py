"""Crash-safe files: atomic replacement, and append-only logs that tolerate a torn last line.

Every file of a run is written in one of these two ways, so that a reader never sees a partial file.
"""

import errno
import hashlib
import json
import math
import os
import stat
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from hpcrun.drafts import replacing, sync

_HASH = "sha256"
_DIGITS = 64  # of the hash
_CRC = b',"_crc32":"'
_COMMENT_CRC = "# crc32 of the lines above: "
sync_directory = sync


def write_atomic(path: Path, content: bytes | str, mode: int = 0o600) -> None:
    """Replace ``path`` by ``content``; atomicity and errors as in :func:`hpcrun.drafts.replacing`."""
    with replacing(path, mode) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def make_numbered_folder(parent: Path, first: int, *, digits: int = 1) -> Path:
    """Make the folder of ``parent`` with the first free number from ``first`` on, and missing parents.

    Args:
        digits: minimum digits of the name.

    Raises:
        OSError: the folder cannot be made.
    """
    number = first
    while True:
        folder = parent / f"{number:0{digits}d}"
        try:
            folder.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            number += 1
            continue
        return folder


def make_folders(folder: Path, *, below: Path) -> None:
    """Make ``folder`` and its missing parents up to ``below``, but not ``below`` itself.

    A rank that ends must not recreate a run directory that was deleted.

    Raises:
        OSError: the disk refuses; FileNotFoundError if ``below`` does not exist.
    """
    inner = folder.relative_to(below).parts
    for count in range(1, len(inner) + 1):
        below.joinpath(*inner[:count]).mkdir(exist_ok=True)


class HeldFolder:
    """An open folder. Its inode stays in use, so that a later folder of the same name is detected.

    After a remount, which changes the inode, ``run.json`` identifies the folder.

    Raises:
        OSError: the folder cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self._mark = path / "run.json"
        self._content, self._owner = self._marked(), os.fstat(self._descriptor).st_uid

    def is_there(self) -> bool:
        """Return True if the path is still this folder.

        Raises:
            OSError: the file server fails, which proves nothing about the folder.
        """
        try:
            now = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            if os.path.samestat(now, os.fstat(self._descriptor)):
                return True
        except OSError as error:
            # A failover of the server makes the handle stale (ESTALE).
            if error.errno != errno.ESTALE:
                raise
        same = self._content is not None and self._marked() == self._content
        # Another user may have put a copy in its place.
        return same and now.st_uid == self._owner

    def _marked(self) -> bytes | None:
        try:
            return self._mark.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def make_log_folder(folder: Path) -> None:
    """Make an attempt's log folder, ``RUN/logs/JOB/restart-N``; raises OSError as :func:`make_folders`."""
    make_folders(folder, below=folder.parents[2])


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` by ``value`` as indented JSON; raises OSError as :func:`write_atomic` does."""
    write_atomic(path, _indented(finite(value)))


def _indented(value: Mapping[str, Any]) -> bytes:
    return _encoded(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write_hashed(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` as :func:`write_json`, with a hash, so that readers detect damage."""
    write_atomic(path, hashed_json(value))


def hashed_json(value: Mapping[str, Any]) -> bytes:
    """Return the text of a file of :func:`write_hashed`."""
    content = finite(value)
    # First, so that an editor can remove the line and leave valid JSON.
    return _indented({_HASH: _hash(content), **content})


def without_hash(value: dict[str, Any]) -> dict[str, Any] | None:
    """Return the content of a file of :func:`write_hashed` or :func:`write_json`; None if it is damaged."""
    if _HASH in value:
        return value if value.pop(_HASH) == _hash(value) else None
    # A flipped bit may have changed the key of the hash, which is the first key.
    (_, written), *others = [*value.items()] or [("", None)]
    looks_so = isinstance(written, str) and len(written) == _DIGITS
    return None if looks_so and written == _hash(dict(others)) else value


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def finite(value: Any) -> Any:
    """Return ``value`` with null for numbers that are not finite, which JSON cannot express (RFC 8259)."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. A FIFO would block its reader, and ``/dev/zero`` has no end.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """
    return open(path, "rb", opener=_only_regular)


def read_at_most(path: Path, most: int) -> bytes:
    """Return the content of a file that a user has named, which may be a device or of any size.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has more than ``most`` bytes.
    """
    with open_regular(path) as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"Larger than {most >> 20} MiB", str(path))
    return content


def _only_regular(path: str | Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600)
    mode = os.fstat(descriptor).st_mode
    # Python itself refuses a directory.
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file; remove it", str(path))
    return descriptor


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in ``path``, or None if there is none or it is damaged.

    Raises:
        OSError: the file exists but cannot be read.
    """
    try:
        value = json.loads(_read_replaced(path))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return without_hash(value) if isinstance(value, dict) else None


def _read_replaced(path: Path, tries: int = 3) -> str:
    """Return the text of a file that other processes may replace during the read.

    An NFS client may hold the handle of the replaced file, and gets ESTALE; a second open finds the new file
    (nfs(5)).
    """
    try:
        with open_regular(path) as stream:
            return stream.read().decode()
    except OSError as error:
        if error.errno != errno.ESTALE or tries == 1:
            raise
    return _read_replaced(path, tries - 1)


def append_line(path: Path, value: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append a JSON line in a single write, so that lines of two writers do not mix on a local disk.

    Args:
        durable: fsync before returning; for the event log, which decides on restarts.

    Raises:
        OSError: the disk refused.
    """
    append_lines(path, json_line(value), durable=durable)


def json_line(value: Mapping[str, Any]) -> bytes:
    """Return ``value`` as a line of JSON that ends with a checksum of its other bytes."""
    text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    body = _encoded(text).removesuffix(b"}\n")
    return b'%b%b%08x"}\n' % (body, _CRC, zlib.crc32(body))


def without_checksum(line: bytes) -> bytes | None:
    """Return a line of :func:`json_line` without its checksum; None if the checksum is wrong.

    Lines of other programs and of earlier versions have no checksum, and are returned as they are.
    """
    body, mark, written = line.rpartition(_CRC)
    if not mark:
        return line
    return body + b"}" if written.rstrip() == b'%08x"}' % zlib.crc32(body) else None


def digest_of(config: bytes) -> str:
    """Return the digest of the bytes of a config file, as a batch script has it."""
    return hashlib.sha256(config).hexdigest()[:32]


def with_comment_crc(text: str) -> str:
    """Return ``text``, a YAML file, with a last line that has its checksum in a comment."""
    return f"{text}{_COMMENT_CRC}{zlib.crc32(text.encode()):08x}\n"


def without_comment_crc(text: str) -> tuple[str, bool]:
    """Return a text without the line of :func:`with_comment_crc`, and False if its checksum is wrong."""
    body, mark, written = text.rpartition(_COMMENT_CRC)
    return (body, written == f"{zlib.crc32(body.encode()):08x}\n") if mark else (text, True)


def intact_lines(lines: Iterable[bytes]) -> list[bytes]:
    """Return ``lines`` without their checksums, and without the lines whose checksum is wrong."""
    return [line for line in map(without_checksum, lines) if line is not None]


def _encoded(text: str) -> bytes:
    # File names may have bytes that are not UTF-8. Python reads them as surrogates, which JSON can escape.
    return f"{text}\n".encode(errors="backslashreplace")


def append_lines(path: Path, lines: bytes, *, durable: bool = False) -> None:
    """Append whole ``lines`` in a single write; arguments and errors as in :func:`append_line`.

    A line torn by a crash is ended first, so that the new lines do not continue it.
    """
    descriptor = _only_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = b"\n" + lines
        written = os.write(descriptor, lines)
        if written != len(lines):
            # write(2) gives no reason for a short count; for a file the reason is space.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if durable:
            os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)  # write(2) and fsync(2) do not know it.
        raise
    finally:
        os.close(descriptor)


def read_lines(path: Path, size: int | None = None) -> list[dict[str, Any]]:
    """Return the JSON objects in the lines of ``path``, in order, or of its last ``size`` bytes.

    Torn or damaged lines are skipped.
    """
    try:
        with open_regular(path) as stream:
            length = stream.seek(0, os.SEEK_END)
            begin = 0 if size is None else max(0, length - size)
            stream.seek(begin)
            lines = stream.read(length - begin).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    # A read that begins in the middle of the file cuts the first line.
    lines = intact_lines(line for line in lines[1 if begin else 0 :] if line)
    try:
        # One call for all lines takes a third of the time. If a line is damaged, read the lines one by one.
        whole = json.loads(b"[" + b",".join(lines) + b"]")
        if len(whole) == len(lines) and set(map(type, whole)) <= {dict}:
            return list(whole)
    except (ValueError, RecursionError):
        pass
    return [value for line in lines if (value := parse_line(line)) is not None]


def end_of(path: Path, size: int) -> bytes:
    """Return the last ``size`` bytes of a log; none if it cannot be read."""
    try:
        with open_regular(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - size))
            return log.read(size)
    except OSError:
        return b""


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``line``, or None if the line is torn or damaged."""
    try:
        value = json.loads(without_checksum(line) or b"")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
