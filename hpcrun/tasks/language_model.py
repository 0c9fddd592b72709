"""Task of the quick start: a small GPT learns to write Python byte by byte.

It needs no download and no tokenizer, and shows within a minute that it learns: compare the loss with the
unigram entropy, which a model that ignores the context can reach.

Rank 0 packs the sources of Python's standard library into a folder with two files of bytes. The same Python
release and options give the same bytes everywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import sysconfig
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hpcrun.config import Config
from hpcrun.drafts import draft_folder, sync
from hpcrun.errors import UserError
from hpcrun.tasks.gpt import GPT, VOCABULARY, generate
from hpcrun.tasks.options import LanguageModelData, LanguageModelShape
from hpcrun.train.task import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 200
# At a lower temperature, a model as small as the quick start's writes indentation without end.
SAMPLE_TEMPERATURE = 0.85

VERSION = 4

SPLITS = ("train", "validation")
HASHES = "sha256.json"
"""The file with the SHA-256 of each split, which completes a corpus."""

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


class LanguageModel(Task):
    """Next-byte prediction on the Python standard library's sources."""

    unit = "tokens"
    options_of_model: type[LanguageModelShape] = LanguageModelShape
    """The model of the keys in the section ``model``; a subclass of the task may have further keys."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shape = self.options_of_model.model_validate(config.model.own)
        self.units_per_sample = self.shape.context
        self.packing = packing = LanguageModelData.model_validate(config.data.own)
        chosen = packing.path or default_path(packing.max_bytes, packing.validation_fraction)
        self.corpus = Path(chosen)

    def prepare(self) -> None:
        """Pack the corpus, or verify the packed one. Raises UserError."""
        if not self.corpus.exists():
            pack(standard_library(), self.corpus, self.packing)
        verify(self.corpus)

    def build_model(self) -> nn.Module:
        return GPT(self.shape, seed=self.config.seed)

    def train_dataset(self) -> Windows:
        return Windows(split_path(self.corpus, "train"), self.shape.context)

    def validation_dataset(self) -> Windows:
        return Windows(split_path(self.corpus, "validation"), self.shape.context)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte."""
        # Under autocast the logits have half precision, too coarse for a mean over many bytes.
        logits = model(batch[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().long())

    def report(self, model: nn.Module, validation_loss: float | None) -> dict[str, Any]:
        """Return losses in nats per byte, and a text sample; does not change the global random state."""
        sample = generate(
            getattr(model, "module", model),
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
        train, validation = self.train_dataset().tokens, self.validation_dataset().tokens
        return {
            **losses,
            "unigram_entropy": unigram_entropy(train, validation),
            "corpus_sha256": _hashes(self.corpus)["train"],
            "sample": printable(sample).rstrip(),
        }


class Windows(Dataset[Tensor]):
    """Window i of a file is its bytes [i * context, (i + 1) * context], ends included: uint8 [context + 1].

    The last byte of a window, which is only predicted there, is the first byte of the next window.
    """

    def __init__(self, file: Path, context: int, dtype: str = "uint8") -> None:
        """Map ``file``, which holds values of ``dtype`` without a header.

        Raises:
            UserError: the file cannot be read, or does not fill a window.
        """
        self._place = file, context, dtype
        try:
            self.tokens = np.memmap(file, np.dtype(dtype).newbyteorder("<"), "r")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"{file}: cannot be read: {reason}; name a file that every node can read"
            ) from error
        self.context = context
        if not len(self):
            raise UserError(
                f"{file}: {len(self.tokens)} tokens do not fill a sample of {context + 1}; use a smaller "
                "model.context, or more text"
            )

    def __reduce__(self) -> tuple[type[Windows], tuple[Path, int, str]]:
        # A loader process that does not fork maps the file itself.
        return Windows, self._place

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = np.array(self.tokens[start : start + self.context + 1])
        return torch.from_numpy(window if window.itemsize == 1 else window.astype(np.int64))


def printable(text: bytes) -> str:
    """Decode a model's output; replace characters that could control a terminal."""
    letters = text.decode(errors="replace")
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter)[0] != "C" else "\ufffd"
        for letter in letters
    )


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
    hashes = {split: hashlib.sha256(text).hexdigest() for split, text in texts.items()}
    try:
        with draft_folder(folder) as draft:
            for split, text in texts.items():
                split_path(draft, split).write_bytes(text)
            (draft / HASHES).write_text(json.dumps(hashes, indent=2) + "\n")
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


def verify(folder: Path) -> None:
    """Raise UserError unless ``folder`` is a corpus with the recorded hashes."""
    for split, wanted in _hashes(folder).items():
        path = split_path(folder, split)
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}; remove {folder}") from error
        if found != wanted:
            raise UserError(
                f"{path}: damaged: its SHA-256 is not that of {HASHES}; remove {folder}"
            )


def split_path(folder: Path, split: str) -> Path:
    """Return the file of a split of the corpus in ``folder``."""
    return folder / f"{split}.bin"


def _hashes(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / HASHES).read_bytes())
        return {split: str(found[split]) for split in SPLITS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}: not a corpus of this task ({HASHES}: {error}); name another folder in data.path"
        ) from error


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
    counts = np.bincount(train, minlength=VOCABULARY) + 1
    seen = np.bincount(validation, minlength=VOCABULARY)
    return float(-(seen * np.log(counts / counts.sum())).sum() / seen.sum())


def _draw(text: str) -> float:
    """Return a number in [0, 1) that depends only on the text."""
    return int.from_bytes(hashlib.sha256(os.fsencode(text)).digest()[:6], "big") / 2**48
