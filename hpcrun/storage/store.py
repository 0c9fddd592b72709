"""The commit protocol: a checkpoint is committed completely or does not exist.

A checkpoint is written into a temporary folder of one attempt; each file is hashed and fsynced. Then follow
the manifest, the fsync of the folder, one rename(2) to the final name, which must not exist, and the fsync of
the parent. This module handles only plain bytes, so that tests cover every crash point without torch. No
folder is reused: a write into a committed folder would leave its manifest with half-replaced files.
"""

import errno
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from hpcrun.storage import lustre
from hpcrun.storage.disk import (
    LOCAL,
    FileSystem,
    delete,
    make_directories,
    sync_directory,
    with_retries,
)
from hpcrun.storage.errors import (
    CheckpointError,
    amount,
    explained,
    is_space,
    occupied,
    parent_of,
    reason,
)
from hpcrun.storage.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    encode,
    require_file_name,
    require_owner,
    step_name,
)
from hpcrun.storage.reader import CommittedSteps

_DRAFT = re.compile(r"step-\d{9,}\.tmp-.+")
_TRASH = ".trash-"
_DAMAGED_KEPT = 2


class CheckpointStore(CommittedSteps):
    """The checkpoints of a run in ``root``, used by the attempt ``owner``.

    Args:
        root: the folder; the first :meth:`begin` creates it (0700) if it does not exist.
        owner: job and restart, such as ``4711-0``; part of the names of temporary folders.
        nonce: also part of these names, for attempts that may have the same ``owner``.
        fs: the system calls; tests inject faults here.
        patience: seconds to wait for a name that another node created and that a network file system
            does not show here yet (ENOENT, ESTALE).

    Raises:
        CheckpointError: ``owner`` cannot be part of a file name.
    """

    def __init__(
        self,
        root: Path,
        owner: str,
        *,
        nonce: str = "",
        fs: FileSystem = LOCAL,
        patience: float = 3.0,
    ) -> None:
        require_owner(owner)
        super().__init__(root, fs=fs, patience=patience)
        self.owner = owner
        self._incarnation = f"{owner}-{nonce}" if nonce else owner
        self._rooted = False

    # Writing

    @property
    def direct_from(self) -> int:
        """Bytes from which a file of a rank is written past the page cache."""
        return self._fs.direct_from

    def make_root(self) -> None:
        """Create the folder and its missing parents; raises CheckpointError."""
        with explained("be made", self.root):
            make_directories(self._fs, self.root)

    def begin(self, step: int) -> Path:
        """Return a new, empty temporary folder for ``step``; for rank 0.

        A leftover temporary folder of this attempt is removed first.

        Raises:
            CheckpointError: the folder cannot be created.
        """
        draft = self.root / f"{step_name(step)}.tmp-{self._incarnation}"
        with explained("begin a checkpoint", draft):
            with suppress(FileExistsError):
                self._fs.make_directory(self.root)
            if not self._rooted:
                # The process that created the folder may have died before its name was durable.
                sync_directory(self._fs, self.root.parent)
                self._rooted = True
            delete(self._fs, draft)
            self._fs.make_directory(draft)
        return draft

    @contextmanager
    def open_file(self, draft: Path, name: str, *, direct: bool = False) -> Iterator["DraftFile"]:
        """Write a file of ``draft``; any rank may do so. Its ``record`` is available after the block.

        Args:
            direct: bypass the page cache where the file system can; for large blocks that begin at page
                boundaries. This saves processor time and page cache for training.

        Raises:
            CheckpointError: the disk refused a write, the fsync or the close.
        """
        require_file_name(name)
        with self._writing(draft / name, direct) as stream:
            yield stream

    def commit(
        self,
        draft: Path,
        step: int,
        records: Sequence[FileRecord],
        world_size: int,
        meta: Mapping[str, Any],
        still_mine: Callable[[], None],
    ) -> Path:
        """Make the temporary folder ``draft`` the checkpoint of ``step``; return the final folder (rank 0).

        An existing valid checkpoint of this step is kept and ``draft`` is removed (the same step of the
        same run has the same state). An existing damaged checkpoint is replaced.

        Args:
            records: the records of all files of all ranks.
            still_mine: called right before the rename; raises if this attempt may not write any more.
                Its exception is passed on.

        Raises:
            CheckpointError: the checkpoint is not committed, or not durably; the temporary folder stays until
                :meth:`abandon`.
        """
        manifest = self.new_manifest(step, records, world_size, meta)
        if len({record.name for record in records}) != len(records):
            raise CheckpointError(f"{draft}: two files have the same name")
        for record in records:
            self._require_size(draft / record.name, record.size)
        with self._writing(draft / MANIFEST) as stream:
            stream.write(encode(manifest))
        final = self.path(step)
        with explained("be committed", draft):
            sync_directory(self._fs, draft)
            still_mine()
            self._publish(draft, final, step)
            sync_directory(self._fs, self.root)
        self._proven.discard(step)
        return final

    def striping_advice(self, step: int, largest: int) -> str | None:
        """Return a line of advice on Lustre's stripes after the first commit of the run; for rank 0.

        Args:
            step: the committed step.
            largest: size in bytes of the largest file of the save.

        Returns:
            None if the layout fits, another step was committed before, the folder is not on Lustre, or its
            layout is unknown.
        """
        if largest < self._fs.striped_from:
            return None
        with suppress(OSError, CheckpointError):
            # A later attempt would repeat the advice.
            if self._fs.type_of(self.root) == lustre.MAGIC and self.steps() == [step]:
                return lustre.advice(self.root, largest)
        return None

    def new_manifest(
        self, step: int, records: Sequence[FileRecord], world_size: int, meta: Mapping[str, Any]
    ) -> Manifest:
        """Return a manifest of this attempt; raises CheckpointError if ``meta`` is not plain JSON."""
        plain = _plain(meta, step)
        return Manifest(step, world_size, self.owner, time.time(), tuple(records), plain)

    def abandon(self, draft: Path) -> None:
        """Remove the temporary folder ``draft``, if it exists; raises CheckpointError if the disk refuses."""
        if not _DRAFT.fullmatch(draft.name):
            raise CheckpointError(f"{draft}: not a temporary folder of a checkpoint")
        with explained("be removed", draft):
            delete(self._fs, draft)

    def require_free(self, size: int, what: str) -> None:
        """Raise CheckpointError unless the file system of ``root`` has ``size`` free bytes.

        Args:
            what: description of the content, for the message.
        """
        with explained("be examined", self.root):
            free = self._fs.free(parent_of(self.root))
        if free < size:
            raise CheckpointError(
                f"{self.root}: a checkpoint needs {amount(size)} ({what}); {amount(free)} are free, "
                f"{amount(size - free)} too little; free some space, or lower checkpoint.keep"
            )

    # Selecting

    def newest_valid(self) -> Manifest | None:
        """Return the newest checkpoint with a valid manifest and the right file sizes, or None.

        Raises:
            CheckpointError: the folder exists and cannot be read.
        """
        for step in self.steps():
            with suppress(CheckpointError):
                return self.inspect(step)
        return None

    # Cleaning up

    def prune(self, keep: int, protect: Iterable[int] = ()) -> list[int]:
        """Remove the oldest valid checkpoints beyond the newest ``keep``; for rank 0.

        Damaged checkpoints do not count and are not removed. Each folder is renamed,
        and the renames are made durable, before any file is removed: after a crash, a checkpoint is
        complete or gone.

        Args:
            keep: at least 1.
            protect: steps to keep regardless of their age.

        Returns:
            The removed steps, oldest first.

        Raises:
            CheckpointError: the disk refused; the steps that :meth:`steps` still lists are complete.
        """
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least one checkpoint must be kept")
        valid = list(self.valid())
        doomed = sorted(set(valid[keep:]) - set(protect))
        with explained("be pruned", self.root):
            self._remove([self.path(step) for step in doomed])
        return doomed

    def quarantine_damaged(self) -> list[str]:
        """Rename the checkpoints of :meth:`prove` to ``damaged-step-…``; for rank 0.

        The newest two are kept for inspection, and older ones are removed.

        Returns:
            A line for each renamed checkpoint.

        Raises:
            CheckpointError: the disk refused.
        """
        lines = []
        for step in sorted(self._proven):
            aside = self.root / f"damaged-{step_name(step)}-{int(time.time())}"
            with explained("be renamed", self.path(step)), suppress(FileNotFoundError):
                self._fs.rename(self.path(step), aside)
                lines.append(
                    f"step {step} is damaged and was renamed to {aside.name} (the newest "
                    f"{_DAMAGED_KEPT} such folders are kept)"
                )
            self._proven.discard(step)
        if lines:
            with explained("be pruned", self.root):
                sync_directory(self._fs, self.root)
                self._remove([self.root / name for name in self.quarantined()[_DAMAGED_KEPT:]])
        return lines

    def sweep(self) -> list[str]:
        """Remove leftovers: temporary folders, and half-removed folders.

        Only the current owner of the run may call this, and only between saves: a temporary folder in use
        would be removed as well.

        Returns:
            The removed names.

        Raises:
            CheckpointError: the disk refused a removal; the other leftovers are removed.
        """
        leftovers = [
            name for name in self._names() if name.startswith(_TRASH) or _DRAFT.fullmatch(name)
        ]
        troubles = []
        for name in leftovers:
            try:
                with explained("be removed", self.root / name):
                    delete(self._fs, self.root / name)
            except CheckpointError as error:
                troubles.append(error)
        if troubles:
            raise troubles[0]
        return leftovers

    # Private helpers

    @contextmanager
    def _writing(self, path: Path, direct: bool = False) -> Iterator["DraftFile"]:
        with explained("be written", path):
            if direct:
                try:
                    descriptor = with_retries(lambda: self._fs.create_direct(path), self._patience)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    direct = False
                    # Some file systems make the file before they refuse the flag.
                    with suppress(FileNotFoundError):
                        self._fs.unlink(path)
            if not direct:
                descriptor = with_retries(lambda: self._fs.create(path), self._patience)
        stream = DraftFile(self._fs, path, descriptor, direct=direct)
        try:
            yield stream
            stream.finish()
        except OSError as error:
            raise stream.failure(error) from error
        finally:
            stream.discard()

    def _publish(self, draft: Path, final: Path, step: int) -> None:
        # Another attempt may commit the same step between a check and the rename, so the rename itself
        # detects it. The limit guards only against a file system that keeps refusing.
        for _ in range(3):
            try:
                self._fs.rename(draft, final)
                return
            except OSError as error:
                if not occupied(error):
                    raise
            if self._is_whole(step):
                delete(self._fs, draft)
                return
            self._remove([final])
        raise OSError(errno.EEXIST, f"{final.name} reappears after each removal")

    def _remove(self, folders: Sequence[Path]) -> None:
        if not folders:
            return
        away = [
            folder.with_name(f"{_TRASH}{folder.name}-{self.owner}-{secrets.token_hex(4)}")
            for folder in folders
        ]
        for folder, trash in zip(folders, away, strict=True):
            with suppress(FileNotFoundError):  # another attempt was faster
                self._fs.rename(folder, trash)
        sync_directory(self._fs, self.root)
        for trash in away:
            delete(self._fs, trash)


def _plain(meta: Mapping[str, Any], step: int) -> dict[str, Any]:
    # Normalize through JSON: the hash then covers exactly the values that a reader encodes again.
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(meta)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta of step {step} is not plain JSON: {error}") from error
    return values


_SECTOR = 4096


class DraftFile:
    """A write-only binary file; after :meth:`finish`, ``record`` holds its size and hash."""

    def __init__(
        self, fs: FileSystem, path: Path, descriptor: int, *, direct: bool = False
    ) -> None:
        """Take over ``descriptor``. ``direct``: it bypasses the page cache where size and address allow."""
        self.record: FileRecord | None = None
        self._fs, self._path, self._descriptor = fs, path, descriptor
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self._direct = direct

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of ``data``; raises OSError."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        while view:
            count = self._write(view)
            if count <= 0:
                raise OSError(f"the file system took {count} of {len(view)} bytes")
            self._size += count
            view = view[count:]
        return len(data)

    def finish(self) -> None:
        """Fsync and close; raises OSError."""
        self._fs.fsync(self._descriptor)
        descriptor, self._descriptor = self._descriptor, -1
        self._fs.close(descriptor)
        self.record = FileRecord(self._path.name, self._size, self._hash.hexdigest())

    def discard(self) -> None:
        """Close, unless the file is closed; without a record, no commit can include the file."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._fs.close(self._descriptor)

    def failure(self, error: OSError) -> CheckpointError:
        """Return the exception for ``error``; on a full disk, its text has the written and the free bytes."""
        text = f"{self._path}: cannot be written: {reason(error)}"
        if is_space(error):
            text += f"; {amount(self._size)} were written"
            with suppress(OSError):
                text += f", {amount(self._fs.free(parent_of(self._path)))} are free now"
            text += "; free some space, or lower checkpoint.keep"
        return CheckpointError(text)

    def _write(self, view: memoryview) -> int:
        if self._direct:
            whole = len(view) // _SECTOR * _SECTOR
            try:
                if whole:
                    return self._fs.write(self._descriptor, view[:whole])
            except OSError as error:
                # The address or the size does not suit this file system (open(2), O_DIRECT).
                if error.errno != errno.EINVAL:
                    raise
            # Open the file again: clearing the flag with fcntl(2) does not reach the server of a network
            # file system. Forget the descriptor even if close(2) fails: a second close could close a file
            # that another thread has just opened.
            self._direct = False
            descriptor, self._descriptor = self._descriptor, -1
            self._fs.close(descriptor)
            self._descriptor = self._fs.append(self._path)
        return self._fs.write(self._descriptor, view)
