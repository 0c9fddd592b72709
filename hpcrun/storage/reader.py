"""Reading of committed checkpoints: names, manifests and content, all verified.

The module ``store`` adds the commit protocol, which most readers do not need.
"""

import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import xxhash

from hpcrun.storage.disk import FileSystem, OpenFile, again_if_stale, blocks
from hpcrun.storage.errors import (
    CheckpointError,
    DamagedCheckpoint,
    explained,
    reason,
)
from hpcrun.storage.manifest import (
    MANIFEST,
    MANIFEST_LIMIT,
    FileRecord,
    Manifest,
    committed_steps,
    decode,
    step_name,
)

_QUARANTINED = re.compile(r"damaged-step-(\d{9,})-(\d+)")


class CommittedSteps:
    """The checkpoints in ``root``; see :class:`hpcrun.storage.store.CheckpointStore`."""

    def __init__(self, root: Path, *, fs: FileSystem, patience: float) -> None:
        self.root = root
        self._fs = fs
        self._patience = patience
        self._proven: set[int] = set()

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of ``step``, whether or not it exists."""
        return self.root / step_name(step)

    def require_private(self, steps: Iterable[int] = ()) -> None:
        """Raise CheckpointError if everybody may write to ``root``: its weights could be anyone's.

        Args:
            steps: also check the folders and files of these steps.
        """
        _refuse_open_to_all(self.root, f"chmod o-w {self.root}")
        for folder in map(self.path, steps):
            with suppress(OSError):  # the reader reports paths that cannot be listed
                for path in (folder, *folder.iterdir()):
                    _refuse_open_to_all(path, f"chmod -R o-w {folder}")

    def steps(self) -> list[int]:
        """Return the committed steps, newest first, valid or damaged.

        Raises:
            CheckpointError: the folder exists and cannot be read.
        """
        return committed_steps(self._names())

    def require_none(self, remedy: str) -> None:
        """Raise CheckpointError if there are checkpoints that this training run did not restore.

        A save keeps an existing step, so the checkpoint of the other training run would stay.

        Args:
            remedy: the call that restores the checkpoints.
        """
        steps: list[int] = []
        with suppress(CheckpointError):  # the save itself reports a folder that cannot be listed
            steps = self.steps()
        if steps:
            raise CheckpointError(
                f"{self.root}: contains checkpoints up to step {steps[0]}, which this training run did not "
                f"restore; call {remedy} first, or use another folder"
            )

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of ``step``.

        Raises:
            DamagedCheckpoint: the manifest is missing, unreadable or changed.
            CheckpointError: another version of hpcrun has another format.
        """
        path = self.path(step) / MANIFEST
        try:
            raw = b"".join(blocks(self._fs, path, MANIFEST_LIMIT, self._patience))
            manifest = decode(raw)
        except OSError as error:
            raise _unreadable(path, error) from error
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{path}: {error}", file=MANIFEST) from error
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if manifest.step != step:
            raise DamagedCheckpoint(f"{path}: belongs to step {manifest.step}", file=MANIFEST)
        return manifest

    def valid(self) -> dict[int, Manifest]:
        """Return the manifests of all checkpoints with the right file sizes, newest first.

        Raises:
            CheckpointError: the folder exists and cannot be read.
        """
        found = {}
        for step in self.steps():
            with suppress(CheckpointError):
                found[step] = self.inspect(step)
        return {step: manifest for step, manifest in found.items() if step not in self._proven}

    def check(self, step: int) -> None:
        """Read all files of ``step`` and compare them with the manifest.

        Raises:
            DamagedCheckpoint: a file is missing, or its size or content is wrong; the text names the file.
        """
        for record in self.manifest(step).files:
            self.check_file(step, record)

    def check_file(
        self, step: int, record: FileRecord, read: Callable[[int], None] = lambda _: None
    ) -> None:
        """Read one file of ``step`` and compare it with its record; raises DamagedCheckpoint.

        Args:
            read: called with the bytes of each block.
        """
        path = self.path(step) / record.name
        content, size = xxhash.xxh3_128(), 0
        for block in self._content(step, record.name, record.size + 1):
            content.update(block)
            size += len(block)
            read(len(block))
        if size != record.size:
            text = f"{path}: does not have the {record.size} bytes that were written"
            raise DamagedCheckpoint(text, file=record.name)
        if content.hexdigest() != record.xxh3:
            raise self.changed(step, record.name)

    def read(self, step: int, name: str) -> bytes:
        """Return the content of a small file of ``step``; raises DamagedCheckpoint, as :meth:`check`."""
        record = self.manifest(step).record(name)
        found = b"".join(self._content(step, name, record.size))
        if len(found) != record.size or xxhash.xxh3_128_hexdigest(found) != record.xxh3:
            raise self.changed(step, name)
        return found

    @contextmanager
    def opened(self, step: int, name: str) -> Iterator[OpenFile]:
        """Open a file of ``step`` for reading in the block.

        Raises:
            DamagedCheckpoint: the file is missing, unreadable or too short, also during the block.
        """
        path = self.path(step) / name
        try:
            with closing(OpenFile(self._fs, path, self._patience)) as file:
                yield file
        except OSError as error:
            raise _unreadable(path, error) from error
        except EOFError as error:
            text = f"{path}: is shorter than when it was written"
            raise DamagedCheckpoint(text, file=name) from error

    def inspect(self, step: int) -> Manifest:
        """Return the manifest of ``step`` after a check of the file sizes.

        Raises:
            DamagedCheckpoint: as :meth:`manifest`, or the size of a file is wrong.
        """
        manifest = self.manifest(step)
        for record in manifest.files:
            try:
                self._require_size(self.path(step) / record.name, record.size)
            except CheckpointError as error:
                raise DamagedCheckpoint(str(error), file=record.name) from error.__cause__
        return manifest

    def drop_cache(self, step: int, name: str) -> None:
        """Drop a file from this node's page cache, so that the next read comes from the disk."""
        # An error is ignored here: the next read reports it.
        with suppress(OSError):
            descriptor = self._fs.open(self.path(step) / name)
            try:
                self._fs.drop_cache(descriptor)
            finally:
                self._fs.close(descriptor)

    def prove(self, step: int) -> None:
        """Mark ``step`` as damaged, after a second check on this rank: :meth:`valid` omits it."""
        self._proven.add(step)

    def changed(self, step: int, name: str) -> DamagedCheckpoint:
        """Return an exception about the hash of the file ``name`` of ``step``."""
        text = f"{self.path(step) / name}: its content differs from the written content (hash)"
        return DamagedCheckpoint(text, file=name)

    def quarantined(self) -> list[str]:
        """Return the names of the folders of quarantined checkpoints, newest first.

        Raises:
            CheckpointError: the folder exists and cannot be read.
        """
        found = [(match, name) for name in self._names() if (match := _QUARANTINED.fullmatch(name))]
        return [name for _, name in sorted(found, key=lambda pair: -int(pair[0][2]))]

    # Private helpers

    def _is_whole(self, step: int) -> bool:
        try:
            self.check(step)
        except DamagedCheckpoint:
            return False
        return step not in self._proven

    def _content(self, step: int, name: str, limit: int) -> Iterator[memoryview]:
        path = self.path(step) / name
        try:
            yield from blocks(self._fs, path, limit, self._patience)
        except OSError as error:
            raise _unreadable(path, error) from error

    def _require_size(self, path: Path, size: int) -> None:
        """Raise CheckpointError unless ``path`` is a file of ``size`` bytes."""
        with explained("be read", path), closing(OpenFile(self._fs, path, self._patience)) as file:
            found = file.size()
        if found != size:
            raise CheckpointError(f"{path}: has {found} bytes, but {size} were written")

    def _names(self) -> list[str]:
        with explained("be listed", self.root):
            try:
                return again_if_stale(lambda: self._fs.names(self.root))
            except FileNotFoundError:
                return []


def _unreadable(path: Path, error: OSError) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path}: cannot be read: {reason(error)}", file=path.name)


def _refuse_open_to_all(path: Path, remedy: str) -> None:
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # then reading fails as well, and the reader reports it
    if mode & stat.S_IWOTH:
        raise CheckpointError(f"{path}: everybody may write to it; run `{remedy}` first")
