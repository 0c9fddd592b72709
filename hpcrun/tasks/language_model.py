"""Task of the quick start: a small GPT learns to write Python byte by byte.

It needs no download and no tokenizer, and shows within a minute that it learns: compare the loss with the
unigram entropy, which a model that ignores the context can reach.

Rank 0 packs the sources of Python's standard library into a folder of token shards, in which each byte is a
token. The same Python release and options give the same bytes everywhere.
"""

from __future__ import annotations

import hashlib
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
from torch import nn

from hpcrun.config import Config
from hpcrun.tasks.gpt import GPT, VOCABULARY, generate
from hpcrun.tasks.options import LanguageModelData, LanguageModelShape, TokenData
from hpcrun.tasks.token_model import TokenModel
from hpcrun.tasks.tokens.shards import TokenError
from hpcrun.tasks.tokens.writing import write_folder
from hpcrun.train.task import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 200
# At a lower temperature, a model as small as the quick start's writes indentation without end.
SAMPLE_TEMPERATURE = 0.85

VERSION = 3

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


class LanguageModel(TokenModel):
    """Next-byte prediction on the Python standard library's sources."""

    vocabulary = VOCABULARY
    options_of_model: type[LanguageModelShape] = LanguageModelShape
    """The model of the keys in the section ``model``; a subclass of the task may have further keys."""

    def __init__(self, config: Config) -> None:
        Task.__init__(self, config)
        self.shape = self.options_of_model.model_validate(config.model.own)
        self.units_per_sample = self.shape.context
        self.packing = packing = LanguageModelData.model_validate(config.data.own)
        chosen = packing.path or default_path(packing.max_bytes, packing.validation_fraction)
        self.options = TokenData(paths=[str(chosen)], verify=True)

    def prepare(self) -> None:
        """Pack the corpus, or verify the packed one. Raises TokenError."""
        (folder,) = self._paths
        if not folder.exists():
            pack(standard_library(), folder, self.packing)
        elif not folder.is_dir():
            raise TokenError(
                f"{folder}: not a folder of token shards; name another folder in data.path"
            )
        super().prepare()

    def build_model(self) -> nn.Module:
        return GPT(self.shape, seed=self.config.seed)

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
        (train,), (validation,) = self._sources[0].shards, self._held_out[0].shards
        return {
            **losses,
            "unigram_entropy": unigram_entropy(train.values, validation.values),
            "corpus_sha256": train.sha256,
            "sample": printable(sample).rstrip(),
        }


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
        TokenError: a source cannot be read, fewer than two files fit, or the folder cannot be written.
    """
    files, held_out = choose(root, options.max_bytes, options.validation_fraction)
    try:
        write_folder(
            folder,
            files,
            vocabulary=VOCABULARY,
            tokenizer="bytes",
            end_token=None,
            shard_tokens=options.max_bytes,
            validation=held_out.__contains__,
        )
    except TokenError:
        if not folder.exists():
            raise


def sources(root: Path) -> list[str]:
    """Return the ``.py`` files to train on under ``root``: relative names, sorted.

    Raises TokenError if there are none (some Pythons have their library in a zip file).
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
        raise TokenError(
            f"{root}: no Python sources to pack a corpus from; "
            "set data.path to a corpus packed on another machine"
        )
    return sorted(names)


def choose(root: Path, max_bytes: int, validation_fraction: float) -> tuple[Files, set[str]]:
    """Return the sources under ``root``, and the names of those for validation.

    Two hashes of a file's name decide its place in the order and its split, so that a new module moves
    hardly any other file to the other split, and any beginning of a split is a fair sample of the split.
    Files are taken in this order until the next would exceed ``max_bytes``. Raises TokenError if a source
    cannot be read, or if fewer than two files fit.
    """
    taken: Files = []
    room = max_bytes
    for name in sorted(sources(root), key=lambda name: _draw(f"order/{name}")):
        try:
            text = (root / name).read_bytes()
        except OSError as error:
            raise TokenError(f"{root / name}: cannot be read: {error.strerror}") from error
        if len(text) > room:
            break
        room -= len(text)
        # Many __init__.py files are empty; as the only file of a split, such a file would leave it without
        # text.
        if len(text) > 1:
            taken.append((name, text))
    if len(taken) < 2:
        raise TokenError(
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
