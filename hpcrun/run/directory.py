"""Where everything of a run lies. One object knows every path, so that nothing else spells one."""

import contextlib
import difflib
import errno
import os
import shlex
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.errors import UserError
from hpcrun.run.io.files import sync_directory, write_atomic, write_json
from hpcrun.run.leftovers import clear_husk, make_staged, publish, sweep

_FREE_IT = "put it right, move it away, or choose another --name"


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
    def code(self) -> Path:
        """The snapshots of the code, a folder a submission."""
        return self.path / "code"

    @property
    def events(self) -> Path:
        """What happened to it (JSON lines, append-only)."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One line a logged step, by rank 0 (JSON lines, append-only)."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """Traces and tables of the profiler, for each rank."""
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path:
        """The committed checkpoints, a folder each."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """What the processes printed: a folder a job, a folder a restart, a file a task."""
        return self.path / "logs"

    @property
    def batch_script(self) -> Path:
        """The batch script of the newest submission to Slurm by `hpcrun submit`."""
        return self.logs / "batch.sbatch"

    def unstarted(self, job: str) -> Path:
        """A line for each try to start the batch step of ``job``; the step removes the file as it begins."""
        return self.path / f".unstarted-{job}"

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

    def nonfinite(self, step: int) -> Path:
        """What is known of a step whose gradients were not finite: losses and samples (JSON)."""
        return self.path / "nonfinite" / f"step-{step}.json"

    @property
    def measured(self) -> tuple[Path, ...]:
        """What a training tells of itself, step by step, beside its logs."""
        return self.metrics, self.tensorboard, self.profile, self.nonfinite(0).parent

    def job_logs(self, job: str) -> Path:
        """The folder of one job's logs."""
        return self.logs / job

    def attempt_logs(self, job: str, restart: int) -> Path:
        """The folder of one attempt's logs: ``rank-00003.log`` a task, and what its end left behind."""
        return self.job_logs(job) / f"restart-{restart}"

    def exists(self) -> bool:
        """Whether a whole run lies there, as far as this user can see."""
        # os.path asks without raising: a name may be too long, a folder another user's.
        return os.path.isfile(self.config) and os.path.isfile(self.record)  # noqa: PTH113


def create(path: Path, config_text: str, record: Mapping[str, Any], diff: str = "") -> RunDirectory:
    """Make a run directory whole, or not at all.

    It is filled under a temporary name beside its place and renamed: of two submissions of one
    name, one wins and the other is told.

    Raises:
        RunError: the place is taken, or cannot be written; nothing is left behind.
    """
    run = RunDirectory(path)
    filled: Path | None = None
    made = [folder for folder in path.parents if not os.path.lexists(folder)]
    try:
        if os.path.lexists(path) and not clear_husk(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        filled = make_staged(path)
        sweep(filled)
        staged = RunDirectory(filled)
        for folder in (staged.checkpoints, staged.logs):
            folder.mkdir(mode=0o700)
        write_atomic(staged.config, config_text)
        if diff:
            write_atomic(staged.diff, diff)
        write_json(staged.record, record)
        publish(filled, path)
        sync_directory(path.parent)
    except BaseException as error:
        if filled is not None:
            shutil.rmtree(filled, ignore_errors=True)
        remove_if_empty(made)
        if not isinstance(error, OSError):
            raise
        if run.exists():
            raise RunError(
                f"{path}: exists already; choose another --name, or continue it with "
                f"`hpcrun resume {shlex.quote(str(path))}`"
            ) from error
        if os.path.lexists(path):
            raise RunError(f"{path}: is taken, by {_what_lies(path)}; {_FREE_IT}") from error
        raise RunError(
            f"{path}: the run directory cannot be made: {error.strerror or error}; choose a writable "
            "place with --runs-dir or free some space"
        ) from error
    return run


def remove_if_empty(folders: Iterable[Path]) -> None:
    """Remove the folders that were made on the way to one that could not be, deepest first."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _what_lies(path: Path) -> str:
    run = RunDirectory(path)
    if not path.is_dir():
        return "a file"
    if os.path.lexists(run.record) or os.path.lexists(run.config):
        missing = run.record if os.path.lexists(run.config) else run.config
        return f"a run without its {missing.name}"
    return "a folder that is no run"


def find(run: str, runs_dir: Path) -> RunDirectory:
    """The run that a person names: a name under ``runs_dir``, or a path.

    Raises:
        RunError: no whole run lies there, or others may write to it.
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
                f"{path}: you may not read it; it belongs to {_owner(path)}, whom to ask for it"
            )
        if os.path.lexists(directory.record):
            raise RunError(f"{path}: is {_what_lies(path)}; {_FREE_IT}")
    known = [entry.parent.name for entry in runs_dir.glob("*/run.json")]
    if not known:
        raise RunError(f"{run}: no such run; there are no runs in {runs_dir} (--runs-dir names it)")
    near = difflib.get_close_matches(run, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is: {_listed(sorted(known))}"
    raise RunError(f"{run}: no such run in {runs_dir}; {hint}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:
        return f"user {path.stat().st_uid}"


def refuse_foreign(run: RunDirectory) -> None:
    """Refuse a run of another user: commands in its config would run as this user.

    Raises:
        RunError: with the option that allows it.
    """
    for path in (run.path, run.config):
        if path.stat().st_uid != os.geteuid():
            raise RunError(
                f"{path}: belongs to {_owner(path)}, and commands in its config would run as you; if you "
                "trust the owner, give --trust-owner"
            )


def refuse_if_writable_by_others(run: RunDirectory) -> None:
    """A directory that anyone may write to could make a job load anyone's weights.

    Raises:
        RunError: with the command that mends it.
    """
    if os.stat(run.path).st_mode & stat.S_IWOTH:  # noqa: PTH116
        raise RunError(f"{run.path}: everybody may write there; run `chmod o-w {run.path}` first")
