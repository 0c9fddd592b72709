"""The undo of a hand-over: after a failure, the files and folders are as they were."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpcrun.drafts import draft_of
from hpcrun.run.directory import remove_if_empty
from hpcrun.run.files import sync_directory, write_atomic


@contextmanager
def put_back_on_failure(*files: Path) -> Iterator[None]:
    """Let ``files`` be what they were if the block fails; the block replaces them, and changes none in place.

    Raises:
        OSError: the disk refuses.
    """
    with ExitStack() as stack:
        kept = {path: stack.enter_context(_kept(path)) for path in files}
        try:
            yield
        except BaseException:
            for path, old in kept.items():
                with contextlib.suppress(OSError):
                    # A rename works on a full disk too.
                    old.replace(path) if old else path.unlink(missing_ok=True)
                    sync_directory(path.parent)
            raise


@contextmanager
def _kept(path: Path) -> Iterator[Path | None]:
    """Give the file ``path`` a second, hidden name during the block; yield None if there is no file."""
    old = draft_of(path)
    try:
        os.link(path, old)
    except FileNotFoundError:
        yield None
        return
    try:
        yield old
    finally:
        with contextlib.suppress(OSError):
            old.unlink(missing_ok=True)


@contextmanager
def written(folder: Path, files: Mapping[str, bytes]) -> Iterator[None]:
    """Write the ``files`` that are missing below ``folder``; remove them again if the block fails.

    Raises:
        OSError: the disk refuses.
    """
    new = {folder / name: content for name, content in files.items()}
    parents = {path.parent for path in new if not path.parent.exists()}
    try:
        with put_back_on_failure(*new):
            for path, content in new.items():
                path.parent.mkdir(mode=0o700, exist_ok=True)
                if not path.exists():
                    write_atomic(path, content)
            yield
    except BaseException:
        remove_if_empty([*parents])
        raise


def remove(folder: Path) -> None:
    """Remove ``folder``; twice, because the script of a cancelled job may still write a file into it."""
    # The rename frees the name: another submission may take it while this one still removes.
    away = folder.with_name(f".{folder.name}.{os.urandom(6).hex()}.new")
    try:
        folder.rename(away)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for _ in range(2):
        shutil.rmtree(away, ignore_errors=True)
