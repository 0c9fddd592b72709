"""Corpus of the Python standard library's own sources: text that every machine already has.

A first run must need no download and no user data, and eight ranks must not walk and read seven hundred
files each. So rank 0 packs the sources into one file, and all ranks read slices of it. The same Python
release and options give the same bytes everywhere.

The first line of the file has the number of train and validation bytes, and the SHA-256 of the rest: the
train bytes, then the validation bytes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.drafts import replacing
from hpcrun.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

VERSION = 2
SPLITS = ("train", "validation")

# Tests and fixtures are not typical code, encodings and pydoc_data are mostly tables, and the installed
# packages differ between machines.
EXCLUDED = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
# Generated during the build of the interpreter, so they depend on the machine.
GENERATED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")

_HEADER = re.compile(
    rf"hpcrun-corpus {VERSION} train (\d{{1,18}}) validation (\d{{1,18}}) sha256 ([0-9a-f]{{64}})\n".encode()
)
_LONGEST = 200

Files = list[tuple[str, bytes]]
"""Names and texts of source files."""


class CorpusError(UserError):
    """The corpus cannot be packed, or the file is not a valid corpus."""


@dataclass(frozen=True)
class CorpusInfo:
    """Description of a packed corpus. ``sha256``: of its text."""

    path: Path
    sha256: str
    header_bytes: int
    train_bytes: int
    validation_bytes: int

    def open(self, split: str) -> Bytes:
        """Return the bytes of ``split``, uint8 [N], mapped from the file. Raises OSError."""
        import numpy as np

        start, size = self.header_bytes, self.train_bytes
        if split == "validation":
            start, size = start + self.train_bytes, self.validation_bytes
        return np.memmap(self.path, dtype=np.uint8, mode="r", offset=start, shape=(size,))

    def unigram_entropy(self) -> float:
        """Return the validation loss of byte frequencies, in nats per byte.

        A model that ignores all context can reach it.
        """
        return unigram_entropy(self.open("train"), self.open("validation"))


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
    return root / "hpcrun" / f"{release}-{max_bytes}-{validation_fraction:g}-v{VERSION}.bin"


def ensure(path: Path, max_bytes: int, validation_fraction: float) -> CorpusInfo:
    """Verify the corpus at ``path``; pack it if the path does not exist.

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

    Several processes may pack to one path concurrently. Raises CorpusError as :func:`choose`, or if the file
    cannot be written.
    """
    texts = [
        b"".join(text for _, text in files)
        for files in choose(root, max_bytes, validation_fraction).values()
    ]
    hashed = hashlib.sha256(b"".join(texts)).hexdigest()
    train, validation = map(len, texts)
    header = f"hpcrun-corpus {VERSION} train {train} validation {validation} sha256 {hashed}\n"
    _write(path, [header.encode(), *texts])
    return read_info(path)


def choose(root: Path, max_bytes: int, validation_fraction: float) -> dict[str, Files]:
    """Return the sources under ``root`` for each split.

    Two hashes of a file's name decide its place in the order and its split, so that a new module moves
    hardly any other file to the other split, and any beginning of a split is a fair sample of the split.
    Files are taken in this order until the next would exceed ``max_bytes``. Raises CorpusError if a source
    cannot be read, or if fewer than two files fit.
    """
    taken: Files = []
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
    draws = sorted((_draw(f"split/{name}"), name) for name, _ in taken)
    held_out = {name for draw, name in draws if draw < validation_fraction}
    # At least one file each.
    held_out = (held_out | {draws[0][1]}) - {draws[-1][1]}
    return {
        "train": [file for file in taken if file[0] not in held_out],
        "validation": [file for file in taken if file[0] in held_out],
    }


def read_info(path: Path) -> CorpusInfo:
    """Return the description of the corpus at ``path``, after checking its header and length.

    Reads no text, so it is cheap enough for every rank. Raises CorpusError with the file's name.
    """
    try:
        with path.open("rb") as file:
            line = file.readline(_LONGEST)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise CorpusError(
            f"{path}: rank 0 has this corpus, but it does not exist here; "
            "set data.path to a file that every node can read"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    found = _HEADER.fullmatch(line)
    if found is None:
        raise CorpusError(f"{path}: not a corpus of this version of hpcrun")
    train, validation, sha256 = int(found[1]), int(found[2]), found[3].decode()
    promised = len(line) + train + validation
    if promised != size:
        raise CorpusError(
            f"{path}: this corpus is damaged: {size} bytes long instead of {promised}"
        )
    return CorpusInfo(path, sha256, len(line), train, validation)


def verify(path: Path) -> CorpusInfo:
    """Check the hash of the text, and return `read_info`. Raises CorpusError."""
    info = read_info(path)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            file.seek(info.header_bytes)
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest.hexdigest() != info.sha256:
        raise CorpusError(f"{path}: this corpus is damaged: its SHA-256 does not match its header")
    return info


def unigram_entropy(train: Bytes, validation: Bytes) -> float:
    """Return the cross-entropy of ``validation`` under ``train``'s byte frequencies, in nats per byte.

    One is added to each count (Laplace's rule), so that a byte that occurs only in ``validation`` has a
    high but finite cost. Both are uint8 [N].
    """
    import numpy as np

    counts = np.bincount(train, minlength=256) + 1
    seen = np.bincount(validation, minlength=256)
    return float(-(seen * np.log(counts / counts.sum())).sum() / seen.sum())


def _draw(text: str) -> float:
    """Return a number in [0, 1) that depends only on the text."""
    return int.from_bytes(hashlib.sha256(os.fsencode(text)).digest()[:6], "big") / 2**48


def _read_source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CorpusError:
    return CorpusError(f"{path}: cannot be read: {error.strerror or error}")


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    """Write the corpus, after what killed writers of the same file have left is removed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(path) as draft, draft.open("wb") as file:
            file.writelines(pieces)
    except OSError as error:
        raise CorpusError(
            f"{path}: cannot write the corpus: {error.strerror or error}; "
            "set data.path or XDG_CACHE_HOME to a writable place with enough space"
        ) from error
