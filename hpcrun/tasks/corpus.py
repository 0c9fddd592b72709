"""The corpus of the quick start: the sources of Python's standard library, packed into two files of bytes.

It needs no download. Rank 0 packs it. The same Python release and options give the same bytes everywhere.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcrun.config.tasks.language_model import BYTES, LanguageModelData
from hpcrun.drafts import draft_folder, sync
from hpcrun.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 4

SPLITS = ("train", "validation")

# Tests and fixtures are not typical code, encodings and pydoc_data are mostly tables, and the installed
# packages differ between machines.
EXCLUDED = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"}
    | {"site-packages", "dist-packages", "__pycache__"}
)
# Generated during the build of the interpreter, so they depend on the machine.
GENERATED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")

Files = list[tuple[str, bytes]]
"""Names and texts of source files."""


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
    return root / "hpcrun" / f"{release}-{max_bytes}-{validation_fraction:g}-v{VERSION}"


def standard_library() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def pack(root: Path, folder: Path, options: LanguageModelData) -> None:
    """Pack the sources under ``root`` into the new ``folder``; another process may pack it concurrently.

    Raises:
        UserError: a source cannot be read, fewer than two files fit, or the folder cannot be written.
    """
    files, held_out = choose(root, options.max_bytes, options.validation_fraction)
    texts = {
        split: b"".join(text for name, text in files if (name in held_out) == (split == SPLITS[1]))
        for split in SPLITS
    }
    try:
        with draft_folder(folder) as draft:
            for split, text in texts.items():
                split_path(draft, split).write_bytes(text)
            for path in (*draft.iterdir(), draft):
                sync(path)
            draft.rename(folder)
            sync(folder.parent)
    except OSError as error:
        if not folder.exists():
            raise UserError(
                f"{folder}: cannot be written: {error.strerror or error}; choose another folder (data.path, "
                "XDG_CACHE_HOME), or free space"
            ) from error


def split_path(folder: Path, split: str) -> Path:
    """Return the file of a split of the corpus in ``folder``."""
    return folder / f"{split}.bin"


def sources(root: Path) -> list[str]:
    """Return the ``.py`` files to train on under ``root``: relative names, sorted.

    Raises UserError if there are none (some Pythons have their library in a zip file).
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
        raise UserError(
            f"{root}: no Python sources to pack a corpus from; "
            "set data.path to a corpus packed on another machine"
        )
    return sorted(names)


def choose(root: Path, max_bytes: int, validation_fraction: float) -> tuple[Files, set[str]]:
    """Return the sources under ``root``, and the names of those for validation.

    Two hashes of a file's name decide its place in the order and its split, so that a new module moves
    hardly any other file to the other split, and any beginning of a split is a fair sample of the split.
    Files are taken in this order until the next would exceed ``max_bytes``. Raises UserError if a source
    cannot be read, or if fewer than two files fit.
    """
    taken: Files = []
    room = max_bytes
    for name in sorted(sources(root), key=lambda name: _draw(f"order/{name}")):
        try:
            text = (root / name).read_bytes()
        except OSError as error:
            raise UserError(f"{root / name}: cannot be read: {error.strerror}") from error
        if len(text) > room:
            break
        room -= len(text)
        # Many __init__.py files are empty; as the only file of a split, such a file would leave it without
        # text.
        if len(text) > 1:
            taken.append((name, text))
    if len(taken) < 2:
        raise UserError(
            f"{root}: data.max_bytes={max_bytes} is enough for {len(taken)} of its files, but training "
            "and validation need one each; raise data.max_bytes"
        )
    draws = sorted((_draw(f"split/{name}"), name) for name, _ in taken)
    held_out = {name for draw, name in draws if draw < validation_fraction}
    # At least one file each.
    return taken, (held_out | {draws[0][1]}) - {draws[-1][1]}


def unigram_entropy(train: NDArray[Any], validation: NDArray[Any]) -> float:
    """Return the cross-entropy of ``validation`` under ``train``'s byte frequencies, in nats per byte.

    A model that ignores all context can reach it. One is added to each count (Laplace's rule), so that a
    byte that occurs only in ``validation`` has a high but finite cost. Both are integers [N].
    """
    counts = np.bincount(train, minlength=BYTES) + 1
    seen = np.bincount(validation, minlength=BYTES)
    return float(-(seen * np.log(counts / counts.sum())).sum() / seen.sum())


def _draw(text: str) -> float:
    """Return a number in [0, 1) that depends only on the text."""
    return int.from_bytes(hashlib.sha256(os.fsencode(text)).digest()[:6], "big") / 2**48
