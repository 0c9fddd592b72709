"""Keep the results of torch.compile in the run directory, so that a restart does not compile again.

A requeue often lands on nodes that have never compiled this model. torch's own cache is a folder of many
small files on the node's disk, which a network file system handles badly. torch can pack the entries that a
process has used into one string of bytes (``torch.compiler.save_cache_artifacts``), which is one file here.
An entry's name is a hash of the graph and of torch's settings, so an entry never serves another model. The
hash includes the number of the GPU, so each GPU of a node has its own file.

A new shape of a batch, or the first validation, compiles for minutes at any step.
"""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from hpcrun.drafts import remove_left
from hpcrun.run.files import write_atomic
from hpcrun.train.position import COMPILING, TRAINING, Position

_HASH = 16
"""Bytes of the hash before the packed entries."""

_PATIENCE = 600.0
"""Seconds: the file is written at once, without a pause."""


class CompileCache:
    """The file of the compiled code, and the entries of it that this process has seen."""

    def __init__(self, path: Path, *, writes: bool, loads: bool) -> None:
        self._path, self._writes, self._loads = path, writes, loads
        self._known: set[tuple[str, str]] = set()
        self._fresh = True

    def load(self) -> str | None:
        """Unpack the file for the compiler; return a line about the result, or None without a file.

        A damaged file changes nothing. The writer of the file removes what killed writers have left.
        """
        if self._writes:
            remove_left(self._path, _PATIENCE)
        if not self._loads:
            return None
        try:
            with self._path.open("rb") as stream:
                status, raw = os.fstat(stream.fileno()), stream.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._ignored(f"cannot be read: {error.strerror}")
        # Entries are pickled, and run when they are used.
        if status.st_mode & stat.S_IWOTH:
            return self._ignored(f"everybody may write to it; run `chmod o-w {self._path}`")
        content = raw[_HASH:]
        if xxhash.xxh3_128_digest(content) != raw[:_HASH]:
            return self._ignored("is damaged")
        try:
            found = torch.compiler.load_cache_artifacts(content)
            if found is None:
                return self._ignored("torch cannot load it")
            self._known = set(_entries(found))
        except Exception as error:  # of any type: the cache is only a shortcut
            return self._ignored(f"torch cannot load it: {type(error).__name__}: {error}")
        return (
            f"compiled code of an earlier start: {len(self._known)} entries, "
            f"{len(content) / 1e6:.1f} MB"
        )

    def after_step(self) -> None:
        """Save the code that the first step of this process has compiled."""
        if self._fresh:
            self._fresh = False
            self.save()

    def save(self) -> None:
        """Write the file if this process has compiled something that the file lacks."""
        if not self._writes:
            return
        try:
            packed = torch.compiler.save_cache_artifacts()
            if packed is None:
                return
            content, info = packed
            entries = set(_entries(info))
        except Exception as error:  # of any type: the cache is only a shortcut
            self._writes = False
            self._not_written(f"torch cannot pack it: {type(error).__name__}: {error}")
            return
        if entries <= self._known:
            return
        self._known |= entries
        try:
            write_atomic(self._path, xxhash.xxh3_128_digest(content) + content)
        except OSError as error:
            self._not_written(f"cannot be written: {error.strerror}")

    def _ignored(self, why: str) -> str:
        return f"{self._path}: {why}; the model is compiled again"

    def _not_written(self, why: str) -> None:
        line = f"{self._path}: {why}; a restart compiles again"
        print(f"hpcrun: {line}", file=sys.stderr, flush=True)


def open_cache(
    path: Path | None, device: torch.device, *, node_rank: int, local_rank: int
) -> CompileCache:
    """Return the cache of a rank."""
    kept = path is not None and hasattr(torch.compiler, "load_cache_artifacts")
    # Where Slurm shows each rank only its own GPU, all of them have the number 0 and share a file.
    loads = kept and local_rank == (device.index or 0)
    return CompileCache(
        file_of(path or Path(os.devnull), device),
        writes=loads and node_rank == 0,
        loads=loads,
    )


def file_of(path: Path, device: torch.device) -> Path:
    """Return the file of ``device``; ``path``: that of the CPU and of the first GPU of a node."""
    return path.with_name(f"{path.stem}-{device.index}{path.suffix}") if device.index else path


def _entries(info: Any) -> Iterator[tuple[str, str]]:
    # torch 2.7 has an attribute per kind; later versions have all kinds in one dictionary.
    for kind, keys in vars(info).get("artifacts", vars(info)).items():
        for key in keys:
            yield kind, key


@contextlib.contextmanager
def shown_in(position: Position, *, wanted: bool) -> Iterator[None]:
    """Within the block, the position of a step in which torch compiles is ``COMPILING``."""
    if not wanted and "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._dynamo.callback import callback_handler

    # The arguments depend on the version of torch.
    def begin(*_: object) -> None:
        if position.doing == TRAINING:
            position.doing = COMPILING

    def end(*_: object) -> None:
        if position.doing == COMPILING:
            position.doing = TRAINING

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        # torch._dynamo.reset() in user code removes all callbacks.
        with contextlib.suppress(ValueError):
            callback_handler.remove_start_callback(begin)
        with contextlib.suppress(ValueError):
            callback_handler.remove_end_callback(end)
