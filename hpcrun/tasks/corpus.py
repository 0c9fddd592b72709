"""Corpus of the Python standard library's own sources: text that every machine already has.

A first run must need no download and no user data, and eight ranks must not walk and read seven hundred
files each. So rank 0 packs the sources into one HDF5 file of bytes, and all ranks read slices of it. The
same Python release and options give the same bytes everywhere.

Layout: groups ``train`` and ``validation``, each with ``bytes`` (uint8 [N]), ``offsets`` (int64 [files +
1], the start of each file) and ``names``; root attributes as in `CorpusInfo`. In front is HDF5's user
block, with the length of the file and the SHA-256 of the rest. It is checked before HDF5 opens the file,
because HDF5 can loop forever on a damaged file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.errors import UserError
from hpcrun.tasks.durable import sync

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

VERSION = 1
MAGIC = f"hpcrun-corpus {VERSION}"
USER_BLOCK = 512  # Bytes; the smallest size that HDF5 allows.
SPLITS = ("train", "validation")

# Tests and fixtures are not typical code, encodings and pydoc_data are mostly tables, and the installed
# packages differ between machines.
EXCLUDED = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
# Generated during the build of the interpreter, so they depend on the machine.
GENERATED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")

_BLOCK = re.compile(
    MAGIC.encode() + rb"\n(?P<size>[0-9]{1,18}) bytes\nsha256 (?P<sha256>[0-9a-f]{64})\n\0*"
)

log = logging.getLogger(__name__)


class CorpusError(UserError):
    """The corpus cannot be packed, or the file is not a valid corpus."""


@dataclass(frozen=True)
class CorpusInfo:
    """Description of a packed corpus.

    ``unigram_entropy``: cross-entropy of the validation bytes under the byte frequencies of the train
    bytes, in nats per byte; a model that ignores all context can reach it. ``sha256``: of the names and
    texts only, so it does not depend on the HDF5 version.
    """

    path: Path
    python: str
    sha256: str
    unigram_entropy: float
    train_bytes: int
    validation_bytes: int


def default_path(
    max_bytes: int, validation_fraction: float, environ: Mapping[str, str] = os.environ
) -> Path:
    """Return the path of the cached corpus for this Python and these options.

    ``$XDG_CACHE_HOME/hpcrun``, else ``~/.cache/hpcrun``; a relative XDG_CACHE_HOME is ignored, as the XDG
    base directory specification requires.
    """
    root = Path(environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        root = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
        root = root / ".cache"
    release = f"{sys.implementation.name}-{platform.python_version()}"
    return root / "hpcrun" / f"{release}-{max_bytes}-{validation_fraction:g}-v{VERSION}.h5"


def ensure_cached(path: Path, max_bytes: int, validation_fraction: float) -> CorpusInfo:
    """Verify the corpus at ``path`` in hpcrun's cache; pack it if it is absent or damaged.

    Raises CorpusError if it cannot be packed or written.
    """
    if path.exists():
        try:
            return verify(path)
        except CorpusError as error:
            log.warning("%s; packing it again", error)
    return pack(standard_library(), path, max_bytes, validation_fraction)


def ensure_at(path: Path, max_bytes: int, validation_fraction: float) -> CorpusInfo:
    """Verify the corpus at a path that the user chose; pack it only if the path does not exist.

    Raises CorpusError if the file is not a valid corpus (it may be the user's own file, so it is never
    overwritten), or if it cannot be packed or written.
    """
    if path.exists():
        try:
            return verify(path)
        except CorpusError as error:
            raise CorpusError(f"{error}; remove it, or name another file in data.path") from error
    return pack(standard_library(), path, max_bytes, validation_fraction)


def standard_library() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def sources(root: Path) -> list[str]:
    """Return the ``.py`` files to train on under ``root``: relative names, sorted.

    Raises CorpusError if there are none (some Pythons have their library in a zip file).
    """
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED]
        inside = Path(folder).relative_to(root)
        names += [
            (inside / file).as_posix()
            for file in files
            if file.endswith(".py") and not file.startswith(GENERATED_PREFIXES)
        ]
    if not names:
        raise CorpusError(
            f"{root}: no Python sources to pack a corpus from; "
            "set data.path to a corpus packed on another machine"
        )
    return sorted(names)


def pack(root: Path, path: Path, max_bytes: int, validation_fraction: float) -> CorpusInfo:
    """Pack the sources under ``root`` into the corpus file ``path``, replacing it atomically.

    Two hashes of a file's name decide its place in the order and its split, so that a new module moves
    hardly any other file to the other split, and any beginning of a split is a fair sample of the split.
    Files are taken in this order until the next would exceed ``max_bytes``. Several processes may pack to
    one path concurrently. Raises CorpusError if a source cannot be read, if fewer than two files fit, or if
    the file cannot be written.
    """
    taken: list[tuple[str, bytes]] = []
    room = max_bytes
    for name in sorted(sources(root), key=lambda name: _draw(f"order/{name}")):
        text = _read_source(root / name)
        if len(text) > room:
            break
        room -= len(text)
        # Many __init__.py files are empty; as the only file of a split, such a file would leave it without
        # text.
        if len(text) > 1:
            taken.append((name, text))
    if len(taken) < 2:
        raise CorpusError(
            f"{root}: data.max_bytes={max_bytes} is enough for {len(taken)} of its files, but training "
            "and validation need one each; raise data.max_bytes"
        )
    _write(path, _split(taken, validation_fraction))
    return read_info(path)


def read_info(path: Path) -> CorpusInfo:
    """Return the description of the corpus at ``path``, after checking its header and length.

    Reads no text, so it is cheap enough for every rank. Raises CorpusError with the file's name.
    """
    import h5py

    try:
        _read_block(path)
        with h5py.File(path, "r", locking=False) as file:
            return CorpusInfo(
                path=path,
                python=str(file.attrs["python"]),
                sha256=str(file.attrs["sha256"]),
                unigram_entropy=float(file.attrs["unigram_entropy"]),
                train_bytes=len(file["train/bytes"]),
                validation_bytes=len(file["validation/bytes"]),
            )
    except FileNotFoundError as error:
        raise CorpusError(
            f"{path}: rank 0 has this corpus, but it does not exist here; "
            "set data.path to a file that every node can read"
        ) from error
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {_one_line(error)}") from error


def verify(path: Path) -> CorpusInfo:
    """Check the hash of the whole file, then return `read_info`. Raises CorpusError."""
    try:
        promised = _read_block(path)
        actual = _hash_after_block(path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {_one_line(error)}") from error
    if actual != promised:
        raise CorpusError(f"{path}: this corpus is damaged: its SHA-256 does not match its header")
    return read_info(path)


def unigram_entropy(train: Bytes, validation: Bytes) -> float:
    """Return the cross-entropy of ``validation`` under ``train``'s byte frequencies, in nats per byte.

    One is added to each count (Laplace's rule), so that a byte that occurs only in ``validation`` has a
    high but finite cost. Both are uint8 [N].
    """
    import numpy as np

    counts = np.bincount(train, minlength=256) + 1
    seen = np.bincount(validation, minlength=256)
    return float(-(seen * np.log(counts / counts.sum())).sum() / seen.sum())


def _split(
    files: list[tuple[str, bytes]], validation_fraction: float
) -> dict[str, list[tuple[str, bytes]]]:
    """Divide two or more files into the splits, at least one file each."""
    draws = sorted((_draw(f"split/{name}"), name) for name, _ in files)
    held_out = {name for draw, name in draws if draw < validation_fraction}
    held_out = (held_out | {draws[0][1]}) - {draws[-1][1]}
    return {
        "train": [file for file in files if file[0] not in held_out],
        "validation": [file for file in files if file[0] in held_out],
    }


def _draw(text: str) -> float:
    """Return a number in [0, 1) that depends only on the text."""
    return int.from_bytes(hashlib.sha256(os.fsencode(text)).digest()[:6], "big") / 2**48


def _read_source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error


def _write(path: Path, splits: Mapping[str, list[tuple[str, bytes]]]) -> None:
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
        _fill(temporary, splits)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except (OSError, RuntimeError) as error:
        raise CorpusError(
            f"{path}: cannot write the corpus: {_one_line(error)}; "
            "set data.path or XDG_CACHE_HOME to a writable place with enough space"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()


def _fill(path: Path, splits: Mapping[str, list[tuple[str, bytes]]]) -> None:
    import h5py
    import numpy as np

    digest = hashlib.sha256()
    texts = []
    with h5py.File(path, "w", userblock_size=USER_BLOCK) as file:
        for split in SPLITS:
            names = [name for name, _ in splits[split]]
            text = np.frombuffer(b"".join(text for _, text in splits[split]), dtype=np.uint8)
            lengths = [len(text) for _, text in splits[split]]
            offsets = np.cumsum([0, *lengths], dtype=np.int64)
            group = file.create_group(split)
            group.create_dataset("bytes", data=text)
            group.create_dataset("offsets", data=offsets)
            group.create_dataset("names", data=names, dtype=h5py.string_dtype())
            digest.update("\0".join([split, *names, ""]).encode("utf-8", "surrogateescape"))
            digest.update(offsets.astype("<i8").tobytes() + text.tobytes())
            texts.append(text)
        file.attrs["python"] = platform.python_version()
        file.attrs["sha256"] = digest.hexdigest()
        file.attrs["unigram_entropy"] = unigram_entropy(*texts)
    size, whole = path.stat().st_size, _hash_after_block(path)
    with path.open("r+b") as raw:
        raw.write(f"{MAGIC}\n{size} bytes\nsha256 {whole}\n".encode().ljust(USER_BLOCK, b"\0"))


def _read_block(path: Path) -> str:
    """Return the SHA-256 of the rest of the file, from the user block.

    Raises CorpusError if there is no such block, or if the file's length differs from the block's.
    """
    with path.open("rb") as file:
        block = file.read(USER_BLOCK)
        size = os.fstat(file.fileno()).st_size
    found = _BLOCK.fullmatch(block)
    if found is None:
        raise CorpusError(f"{path}: not a corpus of this version of hpcrun")
    if int(found["size"]) != size:
        raise CorpusError(
            f"{path}: this corpus is damaged: {size} bytes long instead of {int(found['size'])}"
        )
    return found["sha256"].decode()


def _hash_after_block(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(USER_BLOCK)
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _one_line(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
