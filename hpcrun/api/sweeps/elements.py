"""The run directories of the elements that a submission makes or continues; a failure restores all.

A single run directory is fsynced file by file. For a thousand of them that takes half a minute. Here all
files are written first, then one syncfs(2) makes them durable, and then they become visible together.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.api.submission.code import code_record, compared, copied_code
from hpcrun.api.submission.continuing import compare
from hpcrun.api.submission.handover import changed_files, identity, put_back_on_failure
from hpcrun.api.sweeps.plan import Planned, SweepPlan, job_key
from hpcrun.config import Config
from hpcrun.drafts import draft_folder
from hpcrun.run import directory
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import (
    hashed_json,
    read_json,
    sync_directory,
    with_comment_crc,
    write_atomic,
    write_hashed,
)
from hpcrun.run.snapshot import Snapshot
from hpcrun.run.sweep_file import NAME, SweepFile, write_sweep
from hpcrun.slurm.launch.batch_script import batch_request, batch_script

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a sweep if it is missing; if the block fails and the folder is empty, remove it.

    Raises:
        RunError: something else has the name, or the folder cannot be made.
    """
    run = RunDirectory(folder)
    if run.exists():
        raise RunError(f"{folder}: is a single run; choose another --name for the sweep")
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be made: {error.strerror}; choose a writable place with --runs-dir"
        ) from error
    directory.refuse_if_writable_by_others(run)
    try:
        yield
    except BaseException:
        directory.remove_if_empty(missing)
        raise


@contextmanager
def written_sweep_file(sweep: SweepFile) -> Iterator[None]:
    """Write the new elements to ``sweep.json`` first: after a crash, the missing elements are known."""
    path = sweep.folder / NAME
    new = not path.exists()
    try:
        with put_back_on_failure(path):
            write_sweep(sweep)
            yield
    except BaseException:
        if new:
            shutil.rmtree(RunDirectory(sweep.folder).logs, ignore_errors=True)
            for made in sweep.folder.glob("uncommitted-*.patch"):
                made.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Common:
    """The facts that all elements of a submission share.

    ``snapshot``: the copy of the code. ``identity``: the fields of run.json, and the uncommitted changes.
    ``fitted``: for each job section the config with the values that this cluster decides; empty on this
    machine.
    """

    plan: SweepPlan
    snapshot: Snapshot | None
    identity: tuple[dict[str, Any], str]
    fitted: dict[str, Config]

    def record(self, one: Planned, code: dict[str, Any] | None) -> dict[str, Any]:
        """Return the fields of run.json that the submission decides."""
        values: dict[str, Any] = {"snapshot": bool(self.plan.request.snapshot), "code": code}
        if one.element.template:
            # The config lacks the swept parameters of a command.
            template = [*one.element.template]
            values["sweep"] = {"values": one.element.values, "command": template}
        return values

    def script(self, one: Planned) -> str | None:
        """Return the script that continues the run if Slurm forbids a requeue; None on this machine."""
        if not self.fitted:
            return None
        fitted = self.fitted[job_key(one.element.config)]
        return batch_script(batch_request(one.run, fitted, submitted=one.element.digest))


@contextmanager
def common_state(
    plan: SweepPlan, again: Sequence[Planned], fitted: dict[str, Config]
) -> Iterator[Common]:
    """Copy the code once for all elements, if the plan has no copy; remove it if the block fails."""
    before = read_json(again[0].run.record) if again else None
    folder, facts = RunDirectory(plan.folder), identity(plan.executor)
    if plan.code is not None:
        yield Common(plan, plan.code, facts, fitted)
        return
    with copied_code(folder, before or {}, plan.request.snapshot) as snapshot:
        yield Common(plan, snapshot, facts, fitted)


@contextmanager
def continued(one: Planned, common: Common) -> Iterator[None]:
    """Prepare an element that has run before for another start; restore it if the block fails.

    Raises:
        RunError: it is a run of another config, or of another user.
    """
    run, config = one.run, one.element.config
    directory.refuse_if_writable_by_others(run)
    directory.refuse_foreign(run)
    with put_back_on_failure(*changed_files(run)):
        compare(run, config)
        code = compared(run, common.snapshot)
        write_hashed(run.record, directory.read_record(run) | common.record(one, code))
        write_atomic(run.config, with_comment_crc(one.element.text))
        if (script := common.script(one)) is not None:
            run.batch_script.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(run.batch_script, script)
        run.result.unlink(missing_ok=True)
        yield


@contextmanager
def new_runs(folder: Path, new: Sequence[Planned], common: Common) -> Iterator[None]:
    """Make the run directories of ``new``, visible together; remove them if the block fails.

    Raises:
        OSError: the disk refuses; no run directory remains.
    """
    kept = common.snapshot
    code = None if kept is None else code_record(kept, folder / "000")
    published = list[Path]()
    try:
        with draft_folder(folder / "sweep", mode=0o700) as staged:
            patch = _shared_patch(folder, common.identity[1]) if new else None
            for one in new:
                run = RunDirectory(staged / one.run.path.name)
                for path in (run.path, run.checkpoints, run.logs):
                    path.mkdir(mode=0o700)
                _write(run.config, with_comment_crc(one.element.text).encode())
                _write(run.record, hashed_json(common.identity[0] | common.record(one, code)))
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
