"""Submit a run, all or nothing: a failure or an interruption leaves no half-made run.

A run directory that this command created is removed again; an existing run directory gets its config,
its record and its result back.
"""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from hpcrun.api.interrupts import noted
from hpcrun.api.places import handle
from hpcrun.api.submission.code import keep_code
from hpcrun.api.submission.plan import SubmissionPlan
from hpcrun.config import Config, all_differences, load_resolved, masked_words, to_yaml
from hpcrun.errors import SubmissionUnanswered
from hpcrun.exit_codes import INTERRUPTED
from hpcrun.printing import say_aside
from hpcrun.run import directory, record
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import with_comment_crc, write_atomic
from hpcrun.run.journal.events import Submitted
from hpcrun.run.journal.journal import Journal, job_of_process
from hpcrun.run.record import SubmissionLock
from hpcrun.run.trust import shared_parent_line
from hpcrun.slurm.environment import scrub
from hpcrun.slurm.launch import jobs, submission
from hpcrun.slurm.launch.submitted import ExecutorName, SubmittedJob, withdraw

# SIGINT and SIGTERM end this command; SIGHUP (a closed terminal) does not.
ENDINGS = frozenset({signal.SIGINT, signal.SIGTERM})


def hand_over(plan: SubmissionPlan) -> SubmittedJob | None:
    """Submit the run of ``plan``; None for ``prepared`` and ``debug``: no job.

    Raises:
        OSError: the run directory cannot be written; nothing has changed.
        UserError: a package is missing, the run belongs to another user, is running already, or cannot be
            submitted; nothing has changed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; nothing has changed, or the text names the job that stays.
    """
    plan.require_packages()
    run, ours = plan.run, list[str]()
    with (
        noted(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals,
        _made(plan, ours),
    ):
        directory.refuse_if_writable_by_others(run)
        directory.refuse_foreign(run)
        with SubmissionLock(run):
            refuse_live(run)
            with (
                put_back_on_failure(*changed_files(run)),
                written(run.path, plan.request.files),
            ):
                plan.require_current()
                keep_code(run, plan.request.snapshot)
                changed = _written(run, plan.config)
                stop_if_interrupted(signals)
                submitted = _submitted(plan, signals, ours)
    if plan.start == "new" and (line := shared_parent_line(run.path)):
        say_aside(f"hpcrun: {line}")
    if changed:
        say_aside(f"hpcrun: {run.name}: continues with another config: {'; '.join(changed)}")
    if submitted is not None and not ENDINGS.isdisjoint(signals):
        raise KeyboardInterrupt(
            f"job {submitted.job_id} is submitted and stays; `hpcrun cancel {handle(run)}` ends it"
        )
    for number in signals:
        signal.raise_signal(number)
    return submitted


def _written(run: RunDirectory, config: Config) -> list[str]:
    """Write the config of the new submission, and return its differences from the config before.

    A resume may request other nodes: the ranks read the config of the newest submission.
    """
    changed = []
    if run.config.exists():
        changed = all_differences(load_resolved(run.config), config)
    write_atomic(run.config, with_comment_crc(to_yaml(config)))
    run.result.unlink(missing_ok=True)
    return changed


def _submitted(
    plan: SubmissionPlan,
    signals: list[signal.Signals],
    ours: list[str],
) -> SubmittedJob | None:
    """Submit the job, and withdraw it again after Ctrl-C; ``ours`` gets the withdrawn job."""
    if plan.executor not in ("slurm", "local"):
        return None
    submitted = submission.submit(plan.run, plan.config, plan.executor)
    if signal.SIGINT in signals and withdraw(plan.run, submitted.executor, submitted.job_id):
        ours.append(submitted.job_id)
        stop_if_interrupted(signals)
    return submitted


@contextmanager
def _made(plan: SubmissionPlan, ours: list[str]) -> Iterator[None]:
    """Create the directory of a new run; remove it if the block fails. ``ours``: jobs withdrawn here."""
    run, new = plan.run, plan.start == "new"
    parents = [folder for folder in run.path.parents if not os.path.lexists(folder)]
    if new:
        directory.create(run.path, to_yaml(plan.config), *identity(plan.executor))
    try:
        yield
    except BaseException as error:
        # If two submissions began together, the loser must not remove the directory that the winner uses.
        # A job that Slurm has accepted without an answer needs the directory.
        unanswered = isinstance(error, SubmissionUnanswered)
        if new and not unanswered and not run.submitting.exists():
            given = jobs.current_job(run)
            if given is None or given[1] in ours:
                remove(run.path)
                directory.remove_if_empty(parents)
        raise


def identity(executor: ExecutorName) -> tuple[dict[str, Any], str]:
    """Return the contents of run.json and uncommitted.patch for a run that begins now."""
    facts = record.describe(masked_words([*sys.orig_argv]), executor, Path.cwd())
    return facts, record.uncommitted_diff(Path.cwd())


def remove(folder: Path) -> None:
    """Remove ``folder``; twice, because the script of a cancelled job may write a file into it meanwhile."""
    # The rename frees the name: another submission may take it while this one still removes.
    away = folder.with_name(f".{folder.name}.{os.urandom(6).hex()}.new")
    try:
        folder.rename(away)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for _ in range(2):
        shutil.rmtree(away, ignore_errors=True)


def changed_files(run: RunDirectory) -> tuple[Path, ...]:
    """Return the files of ``run`` that a submission replaces."""
    return (run.config, run.result, run.record)


@contextmanager
def put_back_on_failure(*files: Path) -> Iterator[None]:
    """Give ``files`` their content back if the block fails."""
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


@contextmanager
def written(folder: Path, files: Mapping[str, bytes]) -> Iterator[None]:
    """Write the ``files`` that are missing below ``folder``; remove them again if the block fails."""
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
        directory.remove_if_empty([*parents])
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


def run_here(run: RunDirectory) -> int:
    """Train ``run`` in this process and return its exit code.

    Afterwards the environment and the signal handlers are restored.
    """
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        return _train_here(run)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        # Python sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                # None: C code installed the handler, and Python cannot restore it.
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _train_here(run: RunDirectory) -> int:
    from hpcrun.job.finalize import finalize
    from hpcrun.job.scheduler_view import Ending

    for name in os.environ.keys() - scrub(os.environ).keys():
        del os.environ[name]
    attempt = Attempt(job_of_process(run, os.getpid()), 0)
    Journal(run).append(Submitted(attempt=attempt, executor="debug"))
    try:
        # The entry point of every rank, by name, as in the commands of the other executors.
        return int(import_module("hpcrun.worker").train_here(run.path))
    except KeyboardInterrupt:
        finalize(run, attempt, INTERRUPTED, None, Ending("cancelled"))
        raise
