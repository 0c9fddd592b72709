"""Checkpoint folders in the format of a framework: committed with hashes, verified before use.

A folder ``checkpoint-STEP`` counts after its commit only. The commit hashes and fsyncs every file, and then
writes a hashed manifest atomically. A kill at any time leaves a folder without a manifest, which no restore
uses.
"""

import atexit
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from hpcrun.checkpoint.folder import folder_store
from hpcrun.drafts import sync
from hpcrun.printing import say_aside
from hpcrun.ranks.collective import Ranks
from hpcrun.run.files import hashed_json, read_json, write_hashed
from hpcrun.run.lock_file import LockFile
from hpcrun.run.reports import report
from hpcrun.storage.disk import LOCAL, blocks
from hpcrun.storage.errors import CheckpointError, explained, missing, reason

MANIFEST = "hpcrun.json"
_UNFINISHED = "hpcrun-unfinished"
"""Mark of a folder from the beginning of a save to its commit."""
_REMOVED = ".removed"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_SECONDS = 3.0
"""Seconds to wait for a file of another node that a network file system does not show yet."""


class CheckpointFolders:
    """The folders ``checkpoint-STEP`` of a training in ``root``. Every method but ``path`` is collective.

    Args:
        root: the folder; made if it is missing.
        ranks: all ranks, with a CPU group.
        commits: as ``ranks``, with a group that only commits use, because they run in a thread.
        keep: number of newest checkpoints to keep; None: all.
        facts: names and values that a resume must find unchanged.

    Raises:
        CheckpointError: another process saves there, everybody may write to the folder, or it has a folder
            ``checkpoint-STEP`` of another program.
    """

    def __init__(
        self, root: Path, ranks: Ranks, commits: Ranks, *, keep: int | None, facts: dict[str, Any]
    ) -> None:
        self.root = root.absolute()
        self._ranks, self._commits, self._keep, self._facts = ranks, commits, keep, facts
        self._commit: threading.Thread | None = None
        self._trouble: str | None = None
        busy = f"{self.root}: {{holder}} saves there; use another folder, or end that training"
        self._lock = LockFile(self.root / ".lock", busy, error=CheckpointError)
        ranks.from_rank_0(self._open)

    def path(self, step: int) -> Path:
        """Return the folder of ``step``, whether or not it exists."""
        return self.root / f"checkpoint-{step}"

    def newest(self) -> int | None:
        """Return the newest committed step after a check of all hashes; None without a checkpoint.

        A damaged checkpoint is renamed, and a line says so.

        Raises:
            CheckpointError: all checkpoints are damaged, a file cannot be read, or the facts differ.
        """
        steps = self._ranks.from_rank_0(self._committed)
        for step in steps:
            damage = self._damage(step)
            if damage is None:
                return step
            self._ranks.from_rank_0(partial(self._put_aside, step, damage))
        if steps:
            raise CheckpointError(
                f"{self.root}: no checkpoint is valid; remove them to start again"
            )
        return None

    def prepare(self, step: int) -> Path:
        """Return a new folder for ``step``, after the end of the commit in progress."""
        self.wait()
        self._ranks.from_rank_0(lambda: self._begin(step))
        return self.path(step)

    def commit(self, step: int, protect: Path | None) -> None:
        """Commit the folder of ``step`` in a thread, and then remove old checkpoints except ``protect``."""
        # The commit begins after the last rank has written its files.
        self._ranks.gather(None)
        work = threading.Thread(
            target=self._run, args=(step, protect), name=f"commit of step {step}", daemon=True
        )
        # A training that fails must not lose the save in progress; its other ranks may be gone.
        atexit.register(work.join, 60.0)
        self._commit = work
        work.start()

    def wait(self, *, must: bool = False) -> None:
        """Wait for the commit in progress; print its failure, or with ``must`` raise a CheckpointError."""
        if self._commit is not None:
            self._commit.join()
            atexit.unregister(self._commit.join)
        self._commit, trouble, self._trouble = None, self._trouble, None
        if trouble is not None and must:
            raise CheckpointError(trouble)
        if trouble is not None:
            self._say(trouble)

    def close(self) -> None:
        """Wait for the commit in progress, and release the folder; raises CheckpointError, as ``wait``."""
        try:
            self.wait(must=True)
        finally:
            self._lock.release()

    # Rank 0

    def _open(self) -> None:
        store = folder_store(self.root)
        store.make_root()
        store.require_private()
        self._lock.take(here=3.0, elsewhere=200.0)
        for _, path in self._folders():
            _require_own(path)
        for _, path in self._folders():
            if not (path / MANIFEST).exists():
                _remove(path)
        for left in self.root.glob(f".checkpoint-*{_REMOVED}"):
            shutil.rmtree(left, ignore_errors=True)

    def _begin(self, step: int) -> None:
        folder = self.path(step)
        if folder.exists():
            _require_own(folder)
            _remove(folder)
        with explained("be made", folder):
            folder.mkdir()
            (folder / _UNFINISHED).touch()

    def _folders(self) -> list[tuple[int, Path]]:
        with explained("be listed", self.root):
            found = [(_FOLDER.fullmatch(path.name), path) for path in self.root.iterdir()]
        return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)

    def _committed(self) -> list[int]:
        return [step for step, path in self._folders() if (path / MANIFEST).exists()]

    def _put_aside(self, step: int, damage: str) -> None:
        aside = self.root / f"damaged-checkpoint-{step}-{int(time.time())}"
        with explained("be renamed", self.path(step)):
            self.path(step).rename(aside)
            sync(self.root)
        self._say(f"checkpoint-{step} is damaged ({damage}) and was renamed to {aside.name}")

    def _publish(self, step: int, files: Mapping[str, Any], protect: Path | None) -> None:
        folder = self.path(step)
        for parent in {(folder / name).parent for name in files}:
            sync(parent)
        value = {"step": step, "files": dict(files), "facts": self._facts}
        write_hashed(folder / MANIFEST, value)
        (folder / _UNFINISHED).unlink(missing_ok=True)
        sync(self.root)
        report(step, saved=True)
        for old in self._committed()[self._keep :] if self._keep else ():
            if self.path(old) != protect:
                _remove(self.path(old))

    # Every rank

    def _run(self, step: int, protect: Path | None) -> None:
        ranks = self._commits
        try:
            listed = ranks.gather(_names(self.path(step)))
            mine = self._mine(sorted(set().union(*listed)))
            own = ranks.together(lambda: {name: self._hashed(step, name, True) for name in mine})
            found = {name: one for part in ranks.gather(own) for name, one in part.items()}
            ranks.from_rank_0(lambda: self._publish(step, found, protect))
        except Exception as error:  # the training continues; `wait` reports it
            self._trouble = f"step {step} was not saved: {error}"

    def _damage(self, step: int) -> str | None:
        """Return the first damage of the checkpoint, or None; raises CheckpointError."""
        manifest = self._ranks.from_rank_0(lambda: _manifest(self.path(step) / MANIFEST))
        if manifest is None:
            return f"{MANIFEST}: its content does not match its own hash"
        for name, value in self._facts.items():
            before = manifest["facts"].get(name)
            if before != value:
                raise CheckpointError(
                    f"{self.path(step)}: {name} was {before}, and is {value} now, so the samples of a step "
                    f"would change; set {name} to {before}, or use another folder"
                )
        files = manifest["files"]
        damage = self._ranks.together(lambda: self._first_damage(step, files))
        return next((line for line in self._ranks.gather(damage) if line), None)

    def _first_damage(self, step: int, files: Mapping[str, Any]) -> str | None:
        for name in self._mine(sorted(files)):
            try:
                if self._hashed(step, name, False) != files[name]:
                    return f"{name}: its content differs from the written content (hash)"
            except OSError as error:
                if not missing(error):
                    path = self.path(step) / name
                    raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from error
                return f"{name}: is missing"
        return None

    def _mine(self, names: Sequence[str]) -> Sequence[str]:
        return names[self._ranks.rank :: self._ranks.world_size]

    def _hashed(self, step: int, name: str, durable: bool) -> list[Any]:
        """Return size and hash of a file, which ``durable`` writes to the disk first; raises OSError."""
        content, size = xxhash.xxh3_128(), 0
        for block in blocks(LOCAL, self.path(step) / name, 1 << 62, _SECONDS):
            content.update(block)
            size += len(block)
        if durable:
            sync(self.path(step) / name)
        return [size, content.hexdigest()]

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0:
            say_aside(f"hpcrun: {text}")


def _manifest(path: Path) -> dict[str, Any] | None:
    """Return the content of a manifest, or None if a byte has changed; raises CheckpointError."""
    with explained("be read", path):
        value = read_json(path)
        whole = value is not None and hashed_json(value) == path.read_bytes()
    return value if whole else None


def _require_own(folder: Path) -> None:
    """Raise CheckpointError for a folder that contains only files of another program."""
    with explained("be read", folder):
        names = [path.name for path in folder.iterdir()]
    if names and not any(name.startswith("hpcrun") for name in names):
        raise CheckpointError(
            f"{folder}: is a checkpoint of another program, which an exact resume cannot use; move it away, "
            "or save into another folder"
        )


def _names(folder: Path) -> list[str]:
    """Return the files at and below ``folder``, without those of the commit."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [name for name in found if name not in (MANIFEST, _UNFINISHED)]


def _remove(folder: Path) -> None:
    """Remove a folder, under another name: what a kill leaves does not count as a checkpoint."""
    with explained("be removed", folder):
        hidden = folder.with_name(f".{folder.name}{_REMOVED}")
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)
