"""The run directories of a hand-over: new ones are made, others get their new config; a failure restores all.

A single run directory is fsynced file by file. For a thousand of them that takes half a minute. So the files
of several new runs are written first, then one syncfs(2) makes them durable, and then they become visible
together.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcrun.api.submission.code import code_record, compared, copied_code
from hpcrun.api.submission.run_list import RunList, RunToStart
from hpcrun.api.submission.undo import put_back_on_failure, remove
from hpcrun.config import Config, masked_words
from hpcrun.drafts import draft_folder
from hpcrun.errors import SubmissionUnanswered
from hpcrun.run import directory, record
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import hashed_json, sync_directory, write_atomic, write_hashed
from hpcrun.run.snapshot import Snapshot
from hpcrun.slurm.launch import jobs
from hpcrun.slurm.launch.batch_script import batch_request, batch_script
from hpcrun.slurm.launch.submitted import ExecutorName

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def made_folder(wanted: RunList, withdrawn: Collection[str]) -> Iterator[None]:
    """Make the folder of the hand-over if it is missing; if the block fails, remove it again.

    Args:
        wanted: a new run without siblings gets a complete run directory.
        withdrawn: jobs that this process has submitted and ended.

    Raises:
        RunError: something else has the name, other users may write to it, or it cannot be made.
    """
    folder, alone, new = wanted.folder, wanted.alone, wanted.is_new
    missing = [path for path in (folder.path, *folder.path.parents) if not os.path.lexists(path)]
    if alone is None:
        _make_folder_of_runs(folder)
    elif new:
        directory.create(folder.path, alone.text, *_identity(wanted.executor))
    try:
        directory.refuse_if_writable_by_others(folder)
        if alone is not None:
            directory.refuse_foreign(folder)
        yield
    except BaseException as error:
        # A job that Slurm has accepted without an answer needs the directory.
        if alone is not None and new and not isinstance(error, SubmissionUnanswered):
            # If two submissions began together, the loser must not remove the directory of the winner.
            taken = folder.submitting.exists() or (
                (given := jobs.current_job(folder)) is not None and given[1] not in withdrawn
            )
            if not taken:
                remove(folder.path)
        directory.remove_if_empty(missing)
        raise


def _make_folder_of_runs(folder: RunDirectory) -> None:
    if folder.exists():
        raise RunError(f"{folder.path}: is a single run; choose another --name for the sweep")
    try:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{folder.path}: cannot be made: {error.strerror}; choose a writable place with --runs-dir"
        ) from error


def _identity(executor: ExecutorName) -> tuple[Mapping[str, object], str]:
    """Return the contents of run.json and uncommitted.patch for a run that begins now."""
    facts = record.describe(masked_words([*sys.orig_argv]), executor, Path.cwd())
    return facts, record.uncommitted_diff(Path.cwd())


@dataclass(frozen=True)
class Contents:
    """The contents that the run directories of a hand-over get.

    ``snapshot``: the copy of the code. ``keeps_code``: a copy was wanted. ``fitted``: the config of the job
    of each run that has siblings, by the run's path, with the values that this Slurm decides.
    """

    snapshot: Snapshot | None
    keeps_code: bool
    fitted: Mapping[Path, Config]

    def record(self, one: RunToStart, code: Mapping[str, str] | None) -> dict[str, object]:
        """Return the fields of run.json that the submission decides."""
        return {"snapshot": self.keeps_code, "code": code, **one.facts}

    def script(self, one: RunToStart) -> str | None:
        """Return the script that continues the run if Slurm forbids a requeue.

        None on this machine; a run without siblings has the script of its job.
        """
        fitted = self.fitted.get(one.run.path)
        if fitted is None:
            return None
        return batch_script(batch_request(one.run, fitted, submitted=one.digest))


@contextmanager
def contents(
    wanted: RunList, known: Sequence[RunToStart], fitted: Mapping[Path, Config]
) -> Iterator[Contents]:
    """Copy the code once for all runs, if a copy is wanted; remove it if the block fails.

    Args:
        wanted: may have a copy already.
        known: the runs that have a run directory; the first one's record tells where the code is.
        fitted: as in `Contents`.

    Raises:
        RunError: a record is damaged, or git cannot list the files.
        OSError: the code cannot be copied.
    """
    before = directory.read_record(known[0].run) if known else {}
    keeps = wanted.request.snapshot
    if keeps is None:
        keeps = before.get("snapshot") is not False
    if wanted.code is not None:
        yield Contents(wanted.code, keeps, fitted)
        return
    with copied_code(wanted.folder, before, keeps) as snapshot:
        yield Contents(snapshot, keeps, fitted)


@contextmanager
def continued(one: RunToStart, common: Contents) -> Iterator[None]:
    """Prepare a run that has a run directory for a start; restore it if the block fails.

    Raises:
        RunError: its record is damaged.
        OSError: the disk refuses.
    """
    run, script = one.run, common.script(one)
    scripts = [] if script is None else [run.batch_script]
    with put_back_on_failure(run.config, run.result, run.record, *scripts):
        code = compared(run, common.snapshot)
        write_hashed(run.record, directory.read_record(run) | common.record(one, code))
        write_atomic(run.config, one.file)
        if script is not None:
            run.batch_script.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(run.batch_script, script)
        run.result.unlink(missing_ok=True)
        yield


@contextmanager
def new_runs(wanted: RunList, new: Sequence[RunToStart], common: Contents) -> Iterator[None]:
    """Make the run directories of ``new``, visible together; remove them if the block fails.

    Raises:
        OSError: the disk refuses; no run directory remains.
    """
    if not new:
        yield
        return
    folder, kept = wanted.folder.path, common.snapshot
    code = None if kept is None else code_record(kept, folder / "000")
    facts, diff = _identity(wanted.executor)
    published = list[Path]()
    try:
        with draft_folder(folder / "sweep", mode=0o700) as staged:
            patch = _shared_patch(folder, diff)
            for one in new:
                run = RunDirectory(staged / one.run.path.name)
                for path in (run.path, run.checkpoints, run.logs):
                    path.mkdir(mode=0o700)
                _write(run.config, one.file.encode())
                _write(run.record, hashed_json({**facts, **common.record(one, code)}))
                if (script := common.script(one)) is not None:
                    _write(run.batch_script, script.encode())
                if patch is not None:
                    run.diff.symlink_to(f"../{patch}")
            sync_file_system(folder)
            for one in new:
                (staged / one.run.path.name).rename(one.run.path)
                published.append(one.run.path)
        sync_directory(folder)
        yield
    except BaseException:
        for path in published:
            shutil.rmtree(path, ignore_errors=True)
        raise


def _shared_patch(folder: Path, diff: str) -> str | None:
    """Write the uncommitted changes once for all runs; return the name of the file."""
    if not diff:
        return None
    content = diff.encode(errors="surrogateescape")
    path = folder / f"uncommitted-{hashlib.sha256(content).hexdigest()[:12]}.patch"
    path.write_bytes(content)
    return path.name


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as stream:  # noqa: PTH123  (a descriptor, so that the mode holds)
        stream.write(content)


def sync_file_system(folder: Path) -> None:
    """Make all writes to the file system of ``folder`` durable (syncfs(2)).

    Raises:
        OSError: the disk refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
