"""Where everything of a run lies. One object knows every path, so that nothing else spells one."""

import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.errors import UserError
from hpcrun.run.files import sync_directory, write_atomic, write_json


class RunError(UserError):
    """A run directory that cannot be made, found or used; the text says why and what to do."""


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run. Making this object touches nothing on disk."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name: its folder's."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration that every rank reads (YAML)."""
        return self.path / "config.yaml"

    @property
    def record(self) -> Path:
        """What the run is: command line, commit, versions (JSON)."""
        return self.path / "run.json"

    @property
    def diff(self) -> Path:
        """The uncommitted changes at the time of the first submission (a patch)."""
        return self.path / "uncommitted.patch"

    @property
    def events(self) -> Path:
        """What happened to it (JSON lines, append-only)."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line a logged step, by rank 0 (JSON lines, append-only)."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The committed checkpoints, a folder each."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """What the processes printed: a folder a job, a folder a restart, a file a task."""
        return self.path / "logs"

    @property
    def result(self) -> Path:
        """The final word (JSON)."""
        return self.path / "result.json"

    @property
    def owner(self) -> Path:
        """Which incarnation may write (JSON)."""
        return self.path / "owner.json"

    @property
    def submitting(self) -> Path:
        """Exists while somebody submits this run."""
        return self.path / "submitting.lock"

    def job_logs(self, job: str) -> Path:
        """The folder of one job's logs."""
        return self.logs / job

    def attempt_logs(self, job: str, restart: int) -> Path:
        """The folder of one attempt's logs: ``rank-00003.log`` a task, and what its end left behind."""
        return self.job_logs(job) / f"restart-{restart}"

    def exists(self) -> bool:
        """Whether a whole run lies there."""
        return self.config.is_file() and self.record.is_file()


def create(path: Path, config_text: str, record: Mapping[str, Any], diff: str = "") -> RunDirectory:
    """Make a run directory whole, or not at all.

    It is filled under a temporary name beside its place and renamed: of two submissions of one
    name, one wins and the other is told.

    Raises:
        RunError: the place is taken, or cannot be written; nothing is left behind.
    """
    run = RunDirectory(path)
    staged = RunDirectory(path.with_name(f".{path.name}.{secrets.token_hex(6)}.new"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged.path.mkdir(mode=0o700)
        for folder in (staged.checkpoints, staged.logs):
            folder.mkdir(mode=0o700)
        write_atomic(staged.config, config_text)
        if diff:
            write_atomic(staged.diff, diff)
        write_json(staged.record, record)
        staged.path.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        if staged.path.exists():
            shutil.rmtree(staged.path, ignore_errors=True)
        if path.exists():
            raise RunError(
                f"{path}: exists already; choose another --name, or continue it with "
                f"`hpcrun resume {path.name}`"
            ) from error
        raise RunError(
            f"{path}: the run directory cannot be made: {error.strerror or error}; choose a writable "
            "place with --runs-dir or free some space"
        ) from error
    return run


def find(run: str, runs_dir: Path) -> RunDirectory:
    """The run that a person names: a name under ``runs_dir``, or a path.

    Raises:
        RunError: no whole run lies there, or others may write to it.
    """
    for candidate in (runs_dir / run, Path(run)):
        directory = RunDirectory(candidate.absolute())
        if directory.exists():
            refuse_if_writable_by_others(directory)
            return directory
    known = sorted(entry.parent.name for entry in runs_dir.glob("*/run.json"))
    hint = f"there is: {', '.join(known[:8])}" if known else f"there are no runs in {runs_dir}"
    raise RunError(f"{run}: no such run; {hint}")


def refuse_if_writable_by_others(run: RunDirectory) -> None:
    """A directory that anyone may write to could make a job load anyone's weights.

    Raises:
        RunError: with the command that mends it.
    """
    if os.stat(run.path).st_mode & stat.S_IWOTH:  # noqa: PTH116
        raise RunError(f"{run.path}: everybody may write there; run `chmod o-w {run.path}` first")
