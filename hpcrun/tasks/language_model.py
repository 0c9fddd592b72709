"""Task of the quick start: a small GPT learns to write Python byte by byte.

It needs no download and no tokenizer, and shows within a minute that it learns: compare the loss with the
unigram entropy, which a model that ignores the context can reach.

A window depends only on its index, so the training loop controls the order of samples, and a resumed run
reads exactly the same bytes.

A first run must need no download and no user data, and eight ranks must not walk and read seven hundred
files each. So rank 0 packs the sources into one file, and all ranks read slices of it. The same Python
release and options give the same bytes everywhere.

The first line of the file has the number of train and validation bytes, and the SHA-256 of the rest: the
train bytes, then the validation bytes.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import sys
import sysconfig
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hpcrun.config import Config
from hpcrun.drafts import replacing
from hpcrun.errors import UserError
from hpcrun.tasks.gpt import GPT, generate
from hpcrun.tasks.options import LanguageModelData, LanguageModelShape
from hpcrun.train.task import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 200
# At a lower temperature, a model as small as the quick start's writes indentation without end.
SAMPLE_TEMPERATURE = 0.85


class LanguageModel(Task):
    """Next-byte prediction on the Python standard library's sources."""

    unit = "tokens"
    options_of_model: type[LanguageModelShape] = LanguageModelShape
    """The model of the keys in the section ``model``; a subclass of the task may have further keys."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shape = self.options_of_model.model_validate(config.model.own)
        self.options = LanguageModelData.model_validate(config.data.own)
        self.units_per_sample = self.shape.context

    def prepare(self) -> None:
        """Pack the corpus, or verify the packed one. Raises CorpusError."""
        ensure(self._path, self.options.max_bytes, self.options.validation_fraction)

    def build_model(self) -> nn.Module:
        return GPT(self.shape, seed=self.config.seed)

    def train_dataset(self) -> ByteWindows:
        return self._windows("train", self._corpus.train_bytes)

    def validation_dataset(self) -> ByteWindows:
        return self._windows("validation", self._corpus.validation_bytes)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte; ``batch`` is uint8 [samples, context + 1]."""
        logits = model(batch[:, :-1])
        # Under autocast the logits have half precision, too coarse for a mean over many bytes.
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten().long())

    def report(self, model: nn.Module, validation_loss: float | None) -> dict[str, Any]:
        """Return losses in nats per byte, and a text sample; does not change the global random state."""
        plain = getattr(model, "module", model)
        sample = generate(
            plain,
            SAMPLE_PROMPT,
            SAMPLE_BYTES,
            context=self.shape.context,
            temperature=SAMPLE_TEMPERATURE,
            seed=self.config.seed,
        )
        losses: dict[str, Any] = {}
        if validation_loss is not None:
            losses["validation_loss"] = validation_loss
            losses["bits_per_byte"] = validation_loss / math.log(2)
        return {
            **losses,
            "unigram_entropy": self._corpus.unigram_entropy(),
            "corpus_sha256": self._corpus.sha256,
            "sample": printable(sample).rstrip(),
        }

    @property
    def _path(self) -> Path:
        if self.options.path:
            return Path(self.options.path)
        return default_path(self.options.max_bytes, self.options.validation_fraction)

    @cached_property
    def _corpus(self) -> CorpusInfo:
        return read_info(self._path)

    def _windows(self, split: str, size: int) -> ByteWindows:
        windows = ByteWindows(self._corpus, split, size, self.shape.context)
        if not len(windows):
            raise CorpusError(
                f"{self._path}: its {split} split of {size} bytes is shorter than one sample; "
                f"use model.context={size - 1} or less, or a larger corpus"
            )
        return windows


def printable(text: bytes) -> str:
    """Decode a model's output; replace characters that could control a terminal."""
    letters = text.decode(errors="replace")
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter)[0] != "C" else "\ufffd"
        for letter in letters
    )


class ByteWindows(Dataset[Tensor]):
    """Window i is bytes [i * context, (i + 1) * context], ends included: uint8 [context + 1].

    The last byte of a window, which is only predicted there, is the first byte of the next window. Bytes at
    the end that do not fill a window are dropped. The file is opened at the first sample, so the dataset can
    be sent to loader processes.
    """

    def __init__(self, corpus: CorpusInfo, split: str, size: int, context: int) -> None:
        """``size``: number of bytes of ``split``."""
        self.corpus = corpus
        self.split = split
        self.context = context
        self.count = (size - 1) // context
        self._bytes: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        if self._bytes is None:
            self._bytes = self.corpus.open(self.split)
        start = index * self.context
        return torch.from_numpy(self._bytes[start : start + self.context + 1].copy())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None}


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
