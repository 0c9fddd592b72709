"""Keep the results of torch.compile in the run directory, so that a restart does not compile again.

A requeue often lands on nodes that have never compiled this model. torch's own cache is a folder of many
small files on the node's disk, which a network file system handles badly. torch can pack the entries that a
process has used into one string of bytes (``torch.compiler.save_cache_artifacts``), which is one file here.
An entry's name is a hash of the graph and of torch's settings, so an entry never serves another model. The
hash includes the number of the GPU, so each GPU of a node has its own file.

A new shape of a batch, or the first validation, compiles for minutes at any step.
"""

import contextlib
import json
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from hpcrun.devices import accelerator
from hpcrun.drafts import remove_left
from hpcrun.run.files import write_atomic
from hpcrun.train.position import COMPILING, TRAINING, Position

_FORMAT = 1
_HEADER_LIMIT = 4096
_PATIENCE = 600.0
"""Seconds: the file is written at once, without a pause."""


class CompileCache:
    """The file of the compiled code, and the entries of it that this process has seen.

    Args:
        path: the file; a missing file is normal.
        writes: write the file; True on one rank of the first node for each file.
        loads: unpack the file into torch's cache folder on this node; True on one rank of each node for
            each file.
        device: the device of the model.
    """

    def __init__(self, path: Path, device: torch.device, *, writes: bool, loads: bool) -> None:
        self._path, self._writes, self._loads = path, writes, loads
        self._made_by = _environment(device)
        self._known: set[tuple[str, str]] = set()
        self._fresh = True

    def load(self) -> str | None:
        """Unpack the file for the compiler; return a line about the result, or None without a file.

        A file that is damaged, or written by another torch or device, changes nothing. The writer of the file
        removes what killed writers have left.
        """
        if self._writes:
            remove_left(self._path, _PATIENCE)
        if not self._loads:
            return None
        try:
            with self._path.open("rb") as stream:
                status, raw = os.fstat(stream.fileno()), stream.read()
            owners = {os.geteuid(), self._path.parent.stat().st_uid}
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._ignored(f"cannot be read: {error.strerror}")
        # Entries are pickled, and run when they are used.
        if status.st_mode & stat.S_IWOTH:
            return self._ignored(f"everybody may write to it; run `chmod o-w {self._path}`")
        # Who may write to a shared folder can replace the file, but cannot give it to another owner.
        if status.st_uid not in owners:
            return self._ignored(f"user {status.st_uid} wrote it, who does not own the run")
        content = _content(raw, self._made_by)
        if isinstance(content, str):
            return self._ignored(content)
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
        header = {
            "format": _FORMAT,
            "made_by": self._made_by,
            "size": len(content),
            "xxh3": xxhash.xxh3_128_hexdigest(content),
        }
        try:
            write_atomic(self._path, json.dumps(header).encode() + b"\n" + content)
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
    """Return the cache of a rank.

    A user who names a folder for torch's cache has chosen a place that outlives a job: such a rank uses no
    file.

    Args:
        path: the file of the CPU and of the first GPU of a node; None if the training keeps no file.
    """
    kept = (
        path is not None
        and not _chosen_by_user(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
        and hasattr(torch.compiler, "load_cache_artifacts")
    )
    # Where Slurm shows each rank only its own GPU, all of them have the number 0 and share a file.
    loads = kept and local_rank == (device.index or 0)
    return CompileCache(
        file_of(path or Path(os.devnull), device),
        device,
        writes=loads and node_rank == 0,
        loads=loads,
    )


def file_of(path: Path, device: torch.device) -> Path:
    """Return the file of ``device``; ``path``: that of the CPU and of the first GPU of a node."""
    return path.with_name(f"{path.stem}-{device.index}{path.suffix}") if device.index else path


def _chosen_by_user(folder: str | None) -> bool:
    # The import of torch's compiler sets the variable to torch's own folder, on the disk of this node.
    if folder is None:
        return False
    own = Path(folder).name.startswith("torchinductor_")
    return not (own and Path(folder).parent == Path(tempfile.gettempdir()))


def _content(raw: bytes, here: dict[str, str]) -> bytes | str:
    """Return the packed entries of a file, or the reason for which they are not used."""
    line, _, content = raw[:_HEADER_LIMIT].partition(b"\n")
    content = raw[len(line) + 1 :]
    try:
        header: Any = json.loads(line)
        made_by = dict(header["made_by"])
        whole = (header["format"], header["size"], header["xxh3"]) == (
            _FORMAT,
            len(content),
            xxhash.xxh3_128_hexdigest(content),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return "is damaged"
    # A later version of hpcrun may have written keys that this version does not know.
    for key in here | made_by:
        if made_by.get(key) != here.get(key):
            return f"was written with {key} {made_by.get(key)}, but this is {here.get(key)}"
    return content if whole else "is damaged"


def _environment(device: torch.device) -> dict[str, str]:
    """Return what the compiled code depends on."""
    gpu = accelerator.is_accelerator(device)
    return {
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "device": accelerator.name(device) if gpu else _processor(),
    }


def _processor() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _entries(info: Any) -> Iterator[tuple[str, str]]:
    # torch 2.7 has an attribute per kind; later versions have all kinds in one dictionary.
    for kind, keys in vars(info).get("artifacts", vars(info)).items():
        for key in keys:
            yield kind, key


@contextlib.contextmanager
def shown_in(position: Position, *, wanted: bool) -> Iterator[None]:
    """Within the block, the position of a step in which torch compiles is ``COMPILING``.

    Args:
        wanted: the model is compiled; otherwise do so only if the compiler is loaded already.
    """
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
