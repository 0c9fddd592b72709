"""The commit protocol: a checkpoint is committed whole or does not exist.

It is written into a folder of a temporary name that belongs to one incarnation of the run, each file
fsynced and hashed on its way; then comes the manifest, the fsync of the folder, one rename(2) to its
final name, which did not exist, and the fsync of the parent. Only plain bytes are handled here, so that every
crash point can be tested without torch. No folder is ever reused: writing into a committed one would
leave its manifest standing over half-replaced files.
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

from hpcrun.checkpoint.storage.disk import delete, make_directories, patiently, sync_directory
from hpcrun.checkpoint.storage.draft_file import DraftFile
from hpcrun.checkpoint.storage.errors import (
    CheckpointError,
    DamagedCheckpoint,
    amount,
    explained,
    occupied,
    parent_of,
)
from hpcrun.checkpoint.storage.filesystem import LOCAL, FileSystem
from hpcrun.checkpoint.storage.leases import expired, held
from hpcrun.checkpoint.storage.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    encode,
    require_file_name,
    require_owner,
)
from hpcrun.checkpoint.storage.reader import CommittedSteps, step_name

_DRAFT = re.compile(r"step-\d{9,}\.tmp-.+")
_TRASH = ".trash-"
_DAMAGED_KEPT = 2


class CheckpointStore(CommittedSteps):
    """The checkpoints of one run in ``root``, seen by one incarnation of it, ``owner``.

    Args:
        root: the folder; made (0700) by the first :meth:`begin` if it does not exist.
        owner: job and restart, like ``4711-0``; part of the names of drafts.
        nonce: part of the names of drafts too, where another incarnation may have the same ``owner``.
        fs: the system calls; tests plant faults there.
        patience: seconds to wait for a name that another node made and that a network file system
            does not show here yet (ENOENT, ESTALE).

    Raises:
        CheckpointError: ``owner`` cannot be part of a file's name.
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

    def make_root(self) -> None:
        """Make the folder, and those above it that are missing; raises CheckpointError."""
        with explained("be made", self.root):
            make_directories(self._fs, self.root)

    def begin(self, step: int) -> Path:
        """A fresh, empty draft for ``step``; for rank 0. An own draft left over is removed first.

        Raises:
            CheckpointError: the folder cannot be made.
        """
        draft = self.root / f"{step_name(step)}.tmp-{self._incarnation}"
        with explained("begin a checkpoint", draft):
            with suppress(FileExistsError):
                self._fs.make_directory(self.root)
            if not self._rooted:
                # Whoever made it may have died before its name was durable.
                sync_directory(self._fs, self.root.parent)
                self._rooted = True
            delete(self._fs, draft)
            self._fs.make_directory(draft)
        return draft

    @contextmanager
    def open_file(self, draft: Path, name: str, *, direct: bool = False) -> Iterator[DraftFile]:
        """Write one file of ``draft``; any rank may. Its ``record`` is there after the block.

        Args:
            direct: past the page cache, where the file system can: for large blocks that begin at
                page boundaries. It takes no processor time from training, and no cache from its data.

        Raises:
            CheckpointError: on leaving the block, if the disk refused anything since entering it.
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
        """Make ``draft`` the checkpoint of ``step``; for rank 0. Returns its final folder.

        A whole checkpoint of that step that is there already is kept and the draft dropped (the
        same step of the same run holds the same state); a damaged one is replaced.

        Args:
            records: of every file, from all ranks.
            still_mine: called right before the rename; raises when this incarnation may not write
                any more. What it raises passes through.

        Raises:
            CheckpointError: the checkpoint is not committed, or not durably; the draft is left for
                :meth:`abandon`.
        """
        manifest = Manifest(
            step, world_size, self.owner, time.time(), tuple(records), _plain(meta, step)
        )
        if len({record.name for record in records}) != len(records):
            raise CheckpointError(f"{draft}: two files of one name")
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
        self._distrusted.discard(step)
        self._damaged.discard(step)
        self._proven.discard(step)
        return final

    def abandon(self, draft: Path) -> None:
        """Remove ``draft``; nothing happens when it is gone. Raises CheckpointError if it stays."""
        if not _DRAFT.fullmatch(draft.name):
            raise CheckpointError(f"{draft}: not a draft")
        with explained("be removed", draft):
            delete(self._fs, draft)

    def require_free(self, size: int, what: str) -> None:
        """Raise CheckpointError unless ``size`` bytes are free where ``root`` lies, or will lie.

        Args:
            what: what takes them, for the message.
        """
        with explained("be looked at", self.root):
            free = self._fs.free(parent_of(self.root))
        if free < size:
            raise CheckpointError(
                f"{self.root}: a checkpoint needs {amount(size)} ({what}), {amount(free)} are free, "
                f"{amount(size - free)} too few; free some space, or lower checkpoint.keep"
            )

    # Choosing

    def newest_valid(self, skip: Iterable[int] = ()) -> Manifest | None:
        """The newest checkpoint whose manifest is whole and whose files have their sizes.

        Args:
            skip: steps to pass over.

        Raises:
            CheckpointError: the folder is there and cannot be read.
        """
        skipped = set(skip)
        for step in self.steps():
            if step not in skipped:
                with suppress(DamagedCheckpoint):
                    return self.inspect(step)
        return None

    # Tidying

    def prune(self, keep: int, protect: Iterable[int] = ()) -> list[int]:
        """Remove the oldest valid checkpoints beyond the newest ``keep``; for rank 0.

        Damaged ones neither count as kept nor are removed; what a reader holds stays. Each is
        renamed away, and the renames made durable, before any file is removed: a crash leaves a
        whole checkpoint or none.

        Args:
            keep: at least 1.
            protect: steps that stay whatever their age.

        Returns:
            The steps removed, oldest first.

        Raises:
            CheckpointError: the disk refused; what is still listed by :meth:`steps` is whole.
        """
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least one checkpoint must be kept")
        valid = list(self.valid())
        doomed = sorted(set(valid[keep:]) - set(protect) - held(self._names()))
        with explained("be pruned", self.root):
            self._remove([self.path(step) for step in doomed])
        return doomed

    def set_damaged_aside(self) -> list[str]:
        """Rename the checkpoints that this object has twice found damaged to ``damaged-step-…``; for rank 0.

        They then take no place of those that are kept. The newest two stay for a look, older ones are
        removed: only what was found damaged twice has such a name. A checkpoint that is whole at the second
        look, or that the file system refuses to read, stays in place.

        Returns:
            A line for each that was renamed, and for each that is whole.

        Raises:
            CheckpointError: the disk refused.
        """
        lines, renamed = [], False
        for step in sorted(self._damaged):
            trouble = self._second_trouble(step)
            if trouble is None or not trouble.lasting:
                self._damaged.discard(step)
                if trouble is None:
                    self.trust(step)
                    lines.append(f"step {step} looked damaged, is whole, and stays")
                continue
            aside = self.root / f"damaged-{step_name(step)}-{int(time.time())}"
            with explained("be renamed", self.path(step)), suppress(FileNotFoundError):
                self._fs.rename(self.path(step), aside)
                lines.append(
                    f"step {step} is damaged and was renamed to {aside.name} (the newest "
                    f"{_DAMAGED_KEPT} of these stay)"
                )
                renamed = True
            self._damaged.discard(step)
            self._proven.discard(step)
        if renamed:
            with explained("be pruned", self.root):
                sync_directory(self._fs, self.root)
                self._remove([self.root / name for name in self.set_aside()[_DAMAGED_KEPT:]])
        return lines

    def sweep(self) -> list[str]:
        """Remove what failed or died on its way: drafts, half-removed folders, holds long expired.

        Only the run's present owner may call it, and between its saves: a draft in use would go as well.

        Returns:
            The names of what was removed.

        Raises:
            CheckpointError: the disk refused; everything else is removed.
        """
        names = self._names()
        leftovers = expired(names)
        for name in names:
            if name.startswith(_TRASH) or _DRAFT.fullmatch(name):
                leftovers.append(name)
        troubles = []
        for name in leftovers:
            try:
                with explained("be swept", self.root / name):
                    delete(self._fs, self.root / name)
            except CheckpointError as error:
                troubles.append(error)
        if troubles:
            raise troubles[0]
        return leftovers

    # The parts

    def _second_trouble(self, step: int) -> DamagedCheckpoint | None:
        """Return what is wrong with a damaged step at a second look, if there was none yet."""
        try:
            if step in self._proven:
                return DamagedCheckpoint(f"step {step}: is damaged")
            for record in self.inspect(step).files:
                self.read_anew(step, record.name)
                self.check_file(step, record)
        except DamagedCheckpoint as error:
            return error
        return None

    @contextmanager
    def _writing(self, path: Path, direct: bool = False) -> Iterator[DraftFile]:
        with explained("be written", path):
            if direct:
                try:
                    descriptor = patiently(lambda: self._fs.create_direct(path), self._patience)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    direct = False
                    # Some file systems make the file before they refuse the flag.
                    with suppress(FileNotFoundError):
                        self._fs.unlink(path)
            if not direct:
                descriptor = patiently(lambda: self._fs.create(path), self._patience)
        stream = DraftFile(self._fs, path, descriptor, direct=direct)
        try:
            yield stream
        except BaseException:
            stream.discard()
            stream.raise_failure()
            raise
        stream.finish()

    def _publish(self, draft: Path, final: Path, step: int) -> None:
        # Another incarnation may commit the same step between a look and the rename, so the rename
        # itself finds out. The bound only guards against a file system that keeps refusing.
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
        raise OSError(errno.EEXIST, f"{final.name} keeps coming back")

    def _remove(self, folders: Sequence[Path]) -> None:
        if not folders:
            return
        away = [
            folder.with_name(f"{_TRASH}{folder.name}-{self.owner}-{secrets.token_hex(4)}")
            for folder in folders
        ]
        for folder, trash in zip(folders, away, strict=True):
            with suppress(FileNotFoundError):  # another incarnation was faster
                self._fs.rename(folder, trash)
        sync_directory(self._fs, self.root)
        for trash in away:
            delete(self._fs, trash)


def _plain(meta: Mapping[str, Any], step: int) -> dict[str, Any]:
    # Through JSON and back, so that what is hashed now is what a reader will encode again.
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(meta)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta of step {step} is not plain JSON: {error}") from error
    return values
