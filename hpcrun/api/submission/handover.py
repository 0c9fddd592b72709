"""Submit a run, all or nothing: a failure or an interruption leaves no half-made run.

A run directory that this command created is removed again; an existing run directory gets its config,
its record and its result back.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from hpcrun.api.interrupts import noted
from hpcrun.api.places import handle
from hpcrun.api.submission.code import keep_code
from hpcrun.api.submission.continuing import shortened
from hpcrun.config import Config, all_differences, load_resolved, to_yaml
from hpcrun.errors import SubmissionUnanswered
from hpcrun.printing import say_aside
from hpcrun.run import directory
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import with_comment_crc, write_atomic
from hpcrun.run.record import SubmissionLock
from hpcrun.run.sweep_file import is_element
from hpcrun.slurm.launch import jobs, stopping, submission
from hpcrun.slurm.launch.array import refuse_unrecorded
from hpcrun.slurm.launch.slurm_jobs import ExecutorName, Submitted

# SIGINT and SIGTERM end this command; SIGHUP (a closed terminal) does not.
ENDINGS = frozenset({signal.SIGINT, signal.SIGTERM})


def hand_over(
    run: RunDirectory,
    config: Config,
    executor: ExecutorName,
    *,
    admit: Callable[[], AbstractContextManager[Sequence[str]]],
    make: Callable[[], object] | None = None,
    snapshot: bool | None = None,
    after: Sequence[RunDirectory] = (),
    trust_owner: bool = False,
) -> Submitted | None:
    """Submit ``run``; return None for ``prepared`` (no job) and ``debug`` (this process trains).

    Args:
        admit: a context around the submission, when no other submission can begin: raises if ``run`` cannot
            continue with ``config``, and yields the differences from a config that is replaced.
        make: creates the run directory, if there is none yet.
        snapshot: keep a copy of the code; None: as in the previous submission.
        after: runs that must finish first.
        trust_owner: continue a run of another user.

    Raises:
        UserError: the run belongs to another user, is running already, or cannot be written or submitted;
            nothing has changed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; nothing has changed, or the text names the job that stays.
    """
    submitted, ours = None, list[str]()
    changed: list[str] = []
    with (
        noted(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals,
        _made(run, ours, make),
    ):
        directory.refuse_if_writable_by_others(run)
        if not trust_owner:
            directory.refuse_foreign(run)
        with SubmissionLock(run):
            if is_element(run):
                refuse_unrecorded(RunDirectory(run.path.parent))
            refuse_live(run)
            with put_back_on_failure(run), admit() as replaced:
                keep_code(run, config, snapshot)
                if run.config.exists():
                    changed = all_differences(load_resolved(run.config), config)
                # A resume may request other nodes: the ranks read the config of the newest submission.
                write_atomic(run.config, with_comment_crc(to_yaml(config)))
                run.result.unlink(missing_ok=True)
                stop_if_interrupted(signals)
                if executor in ("slurm", "local"):
                    submitted = submission.submit(
                        run,
                        config,
                        executor,
                        after,
                        interrupted=lambda: not ENDINGS.isdisjoint(signals),
                    )
                    if signal.SIGINT in signals and stopping.withdraw(
                        run, submitted.executor, submitted.job_id, submitted.cluster
                    ):
                        ours.append(submitted.job_id)
                        stop_if_interrupted(signals)
    if replaced:
        say_aside(
            f"hpcrun: {run.name}: no step of its earlier config was saved, so the new config replaces it: "
            f"{shortened(replaced)}"
        )
    elif changed:
        say_aside(f"hpcrun: {run.name}: continues with another config: {'; '.join(changed)}")
    if submitted is not None and not ENDINGS.isdisjoint(signals):
        raise KeyboardInterrupt(
            f"job {submitted.job_id} is submitted and stays; `hpcrun cancel {handle(run)}` ends it"
        )
    for number in signals:
        signal.raise_signal(number)
    return submitted


@contextmanager
def _made(run: RunDirectory, ours: list[str], make: Callable[[], object] | None) -> Iterator[None]:
    """Create the run directory; remove it if the block fails. ``ours``: jobs that this command withdrew."""
    parents = [folder for folder in run.path.parents if not os.path.lexists(folder)]
    if make is not None:
        make()
    try:
        yield
    except BaseException as error:
        # If two submissions began together, the loser must not remove the directory that the winner uses.
        # A job that Slurm has accepted without an answer needs the directory.
        unanswered = isinstance(error, SubmissionUnanswered)
        if make is not None and not unanswered and not run.submitting.exists():
            given = jobs.current_job(run)
            if given is None or given[1] in ours:
                remove(run.path)
                directory.remove_if_empty(parents)
        if isinstance(error, OSError):
            raise RunError(
                f"{error.filename or run.path}: cannot be written: {error.strerror or error}; free "
                "some space there, or choose another folder with --runs-dir"
            ) from error
        raise


def remove(folder: Path, patience: float = 2.0) -> None:
    """Remove ``folder``, for up to ``patience`` seconds.

    The batch script of a cancelled job can still write a file into the folder while the folder is removed.
    """
    # The rename frees the name: another submission may take it while this one still removes.
    away = folder.with_name(f".{folder.name}.{os.urandom(6).hex()}.new")
    try:
        folder.rename(away)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return
    deadline = time.monotonic() + patience
    while True:
        shutil.rmtree(away, ignore_errors=True)
        if not away.exists() or time.monotonic() > deadline:
            return
        time.sleep(0.05)


@contextmanager
def put_back_on_failure(run: RunDirectory) -> Iterator[None]:
    """Give ``run`` its config, result, record and patch back if the block fails."""
    files = (run.config, run.result, run.record, run.diff)
    before = {path: path.read_bytes() if path.exists() else None for path in files}
    try:
        yield
    except BaseException:
        for path, content in before.items():
            with contextlib.suppress(OSError):
                if content is None:
                    path.unlink(missing_ok=True)
                elif not path.exists() or path.read_bytes() != content:
                    write_atomic(path, content)
        raise


def stop_if_interrupted(signals: list[signal.Signals]) -> None:
    """Raise KeyboardInterrupt if one of ``signals`` wants this command to end."""
    if not ENDINGS.isdisjoint(signals):
        raise KeyboardInterrupt("nothing was submitted")


def refuse_live(run: RunDirectory) -> None:
    """Raise RunError if a job has ``run``."""
    now = jobs.state(run)
    if now.cluster is not None:
        raise RunError(
            f"{run.name}: job {now.job} on cluster {now.cluster} has it already; watch and end it there, or, "
            f"if that cluster is gone for good, write it off with `hpcrun cancel --now {handle(run)}`"
        )
    if now.live:
        raise RunError(
            f"{run.name}: job {now.job} has it already ({now.word}); watch it with `hpcrun logs -f "
            f"{handle(run)}`, end it with `hpcrun cancel {handle(run)}`, or choose another --name"
        )
