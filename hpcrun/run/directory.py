"""The paths of a run. All code gets them from one class."""

import contextlib
import difflib
import errno
import os
import pwd
import shlex
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrun.drafts import draft_folder
from hpcrun.errors import UserError
from hpcrun.run.files import (
    read_json,
    sync_directory,
    with_comment_crc,
    write_atomic,
    write_hashed,
)

if TYPE_CHECKING:
    from hpcrun.run.attempt import Attempt

CALLS = ".calls"
"""Folder, in a run or in a sweep folder, with the call of a function and the values of its ranks."""

_FREE_IT = "put it right, move it away, or choose another --name"


class RunError(UserError):
    """A run directory cannot be made, found or used; the text gives the reason and the remedy."""


class _Place:
    """A path of each run directory, relative to it."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, run: "RunDirectory", _owner: type) -> Path:
        return run.path / self._place


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run. Creating this object touches nothing on disk."""

    path: Path

    config = _Place("config.yaml")
    """Resolved configuration that every rank reads (YAML)."""
    record = _Place("run.json")
    """Identity of the run: command line, commit, versions (JSON)."""
    diff = _Place("uncommitted.patch")
    """Uncommitted changes at the first submission (a patch)."""
    code = _Place("code")
    """Snapshots of the code, a folder per submission."""
    events = _Place("events.jsonl")
    """Event log (JSON lines, append-only)."""
    metrics = _Place("metrics.jsonl")
    """Metrics from rank 0, a line per logged step (JSON lines, append-only)."""
    tensorboard = _Place("tensorboard")
    """Event files for TensorBoard."""
    profile = _Place("profile")
    """Traces and tables of the profiler, for each rank."""
    checkpoints = _Place("checkpoints")
    """Committed checkpoints, a folder per step."""
    logs = _Place("logs")
    """Output of the processes: a folder per job, a folder per restart, a file per task."""
    batch_script = _Place("logs/batch.sbatch")
    """Batch script of the newest submission to Slurm by `hpcrun submit`."""
    result = _Place("result.json")
    """Result of the run (JSON)."""
    owner = _Place("owner.json")
    """Owner record: the attempt that may write (JSON)."""
    submitting = _Place("submitting.lock")
    """Lock file that exists during a submission of this run."""

    @property
    def name(self) -> str:
        """Name of the run: the name of its folder, or ``SWEEP/003`` for a run of a sweep."""
        folder = self.path.parent
        in_sweep = os.path.isfile(folder / "sweep.json")  # noqa: PTH113
        return f"{folder.name}/{self.path.name}" if in_sweep else self.path.name

    def unstarted(self, job: str) -> Path:
        """A line per attempt to start the batch step of ``job``; the step removes the file when it begins."""
        return self.path / f".unstarted-{job}"

    def job_logs(self, job: str) -> Path:
        """Folder of a job's logs."""
        return self.logs / job

    def attempt_logs(self, attempt: "Attempt") -> Path:
        """Folder of an attempt's logs: ``rank-00003.log`` per task, and records of its end."""
        return self.job_logs(attempt.job) / f"restart-{attempt.label}"

    def batch_log(self, job: str) -> Path:
        """Output of the batch script of ``job``."""
        return self.logs / f"batch-{job}.log"

    def exists(self) -> bool:
        """Return True if this is a complete run, as far as this user can see."""
        # os.path does not raise: a name may be too long, or a folder may belong to another user.
        return os.path.isfile(self.config) and os.path.isfile(self.record)  # noqa: PTH113


def create(path: Path, config_text: str, record: Mapping[str, Any], diff: str = "") -> RunDirectory:
    """Make a complete run directory, or nothing.

    The folder is filled under a temporary name and renamed. Of two submissions with the same name, one
    succeeds and the other raises.

    Raises:
        RunError: the path is taken, or cannot be written; nothing is left behind.
    """
    run = RunDirectory(path)
    made = [folder for folder in path.parents if not os.path.lexists(folder)]
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        with draft_folder(path, mode=0o700) as filled:
            staged = RunDirectory(filled)
            for folder in (staged.checkpoints, staged.logs):
                folder.mkdir(mode=0o700)
            write_atomic(staged.config, with_comment_crc(config_text))
            if diff:
                write_atomic(staged.diff, diff)
            write_hashed(staged.record, record)
            filled.rename(path)
        sync_directory(path.parent)
    except BaseException as error:
        remove_if_empty(made)
        if not isinstance(error, OSError):
            raise
        if run.exists():
            raise RunError(
                f"{path}: exists already; choose another --name, or continue it with "
                f"`hpcrun resume {shlex.quote(str(path))}`"
            ) from error
        if os.path.lexists(path):
            raise RunError(f"{path}: is already taken by {_describe(path)}; {_FREE_IT}") from error
        raise RunError(
            f"{path}: the run directory cannot be made: {error.strerror or error}; choose a writable "
            "folder with --runs-dir, or free some space"
        ) from error
    return run


def read_record(run: RunDirectory) -> dict[str, Any]:
    """Return the content of run.json, empty without the file; raises RunError if it is damaged."""
    facts = read_json(run.record)
    if facts is None and run.record.exists():
        raise RunError(
            f"{run.record}: is damaged or was edited; correct its values, and remove its line with sha256"
        )
    return facts or {}


def remove_if_empty(folders: Iterable[Path]) -> None:
    """Remove folders that were made for a path that could not be created, deepest first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _describe(path: Path) -> str:
    run = RunDirectory(path)
    if not path.is_dir():
        return "a file"
    if os.path.lexists(run.record) or os.path.lexists(run.config):
        missing = run.record if os.path.lexists(run.config) else run.config
        return f"a run without its {missing.name}"
    return "a folder that is not a run"


def find(run: str, runs_dir: Path) -> RunDirectory:
    """Find a run by its name under ``runs_dir``, or by its path.

    Raises:
        RunError: there is no complete run, or everybody may write to it.
    """
    candidates = [RunDirectory(path.absolute()) for path in (runs_dir / run, Path(run))]
    for directory in candidates:
        if directory.exists():
            refuse_if_writable_by_others(directory)
            return directory
    for directory in candidates:
        path = directory.path
        if run and os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK):  # noqa: PTH112
            raise RunError(
                f"{path}: no permission to read; ask its owner {owner_name(path.stat().st_uid)}"
            )
        if os.path.lexists(directory.record):
            raise RunError(f"{path}: is {_describe(path)}; {_FREE_IT}")
        if run and os.path.isfile(path / "sweep.json"):  # noqa: PTH113
            hint = f"name one of its runs, such as {path.name}/000 (in Python: hpcrun.Sweep)"
            raise RunError(f"{path}: is a sweep; {hint}")
    marks = ("run.json", "sweep.json")
    known = [entry.parent.name for mark in marks for entry in runs_dir.glob(f"*/{mark}")]
    if not known:
        raise RunError(f"{run}: no such run; {runs_dir} has no runs (set it with --runs-dir)")
    near = difflib.get_close_matches(run, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"available: {_listed(sorted(known))}"
    if run.isdecimal():
        of_job = [path.parent.parent.name for path in runs_dir.glob(f"*/logs/{run}")]
        hint = f"job {run} is an attempt of {of_job[0]}: give this name" if of_job else hint
    raise RunError(f"{run}: no such run in {runs_dir}; {hint}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def owner_name(user: int) -> str:
    """Return the name of the user with this number, or the number if there is no name."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


_NEW_FILES: dict[tuple[int, int], int] = {}
"""The owner that new files have, by device and user."""


def is_own(status: os.stat_result, path: Path) -> bool:
    """Return True if a file or folder is this user's.

    Some mounts show all files as those of one user, such as root or nobody (CIFS, FUSE, NFS for root). There
    a new file has this owner too. On other mounts, a new file is never another user's.

    Args:
        status: of the file or folder.
        path: its path.
    """
    return status.st_uid == os.geteuid() or status.st_uid == _owner_of_new_files(status, path)


def shows_owners(folder: Path) -> bool:
    """Return False if a new folder of this user is on a mount that shows it as another user's."""
    try:
        status = folder.stat()
    except OSError:  # not yet made
        return True
    return status.st_uid == os.geteuid() or not is_own(status, folder)


def _owner_of_new_files(status: os.stat_result, path: Path) -> int | None:
    user = os.geteuid()
    if (status.st_dev, user) not in _NEW_FILES:
        folder = path if stat.S_ISDIR(status.st_mode) else path.parent
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                made = os.fstat(file.fileno())
        except OSError:
            return None
        # Somebody may have put a folder of another mount in its place.
        _NEW_FILES[made.st_dev, user] = made.st_uid
    return _NEW_FILES.get((status.st_dev, user))


def refuse_foreign(run: RunDirectory) -> None:
    """Refuse a run of another user: commands in its config would run as this user.

    Raises:
        RunError: with the remedy.
    """
    for path in (run.path, run.config):
        if not is_own(path.stat(), path):
            raise RunError(
                f"{path}: belongs to {owner_name(path.stat().st_uid)}, and commands in its config would run "
                "as you; if you trust the owner, copy the folder with `cp -r`, and continue the copy"
            )


def refuse_if_writable_by_others(run: RunDirectory) -> None:
    """Refuse a directory that everybody may write to: a job could load anyone's weights.

    Raises:
        RunError: with the command that corrects the mode.
    """
    if os.stat(run.path).st_mode & stat.S_IWOTH:  # noqa: PTH116
        raise RunError(f"{run.path}: everybody may write to it; run `chmod o-w {run.path}` first")
