"""The run directories of the elements that a submission makes or continues; a failure restores all."""

import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcrun.api.submission.code import compared
from hpcrun.api.submission.continuing import renewed
from hpcrun.api.submission.handover import put_back_on_failure
from hpcrun.api.sweeps.folder import NewRun
from hpcrun.api.sweeps.plan import Planned, SweepPlan, shared_job
from hpcrun.config import Config, masked_words
from hpcrun.printing import say_aside
from hpcrun.run import directory, record
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import read_json, with_comment_crc, write_atomic, write_hashed
from hpcrun.run.snapshot import Snapshot, take_snapshot
from hpcrun.run.sweep_file import NAME, SweepFile, write_sweep
from hpcrun.slurm.launch import slurm_submission
from hpcrun.slurm.launch.batch_script import batch_request, batch_script


def fitted_configs(
    plan: SweepPlan, wanted: Sequence[Planned], interrupted: Callable[[], bool]
) -> dict[str, Config]:
    """Return, for each job section among ``wanted``, a config with the values that this cluster decides."""
    if plan.executor != "slurm":
        return {}
    found: dict[str, Config] = {}
    counts = Counter(job_key(one.element.config) for one in wanted)
    for one in wanted:
        config = one.element.config
        if (key := job_key(config)) not in found:
            job = shared_job(config.job, min(plan.pack, counts[key]))
            shared = config.model_copy(update={"job": job})
            found[key] = slurm_submission.fitted_with_patience(shared, interrupted)
    return found


def job_key(config: Config) -> str:
    """Return a text that is equal for configs with the same job section."""
    return config.job.model_dump_json()


@contextmanager
def written_sweep_file(sweep: SweepFile) -> Iterator[None]:
    """Write the new elements to ``sweep.json`` first: after a crash, the missing elements are known."""
    path = sweep.folder / NAME
    before = path.read_bytes() if path.exists() else None
    write_sweep(sweep)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if before is None:
                path.unlink(missing_ok=True)
            else:
                write_atomic(path, before)
        raise


@contextmanager
def code_copy(plan: SweepPlan, again: Sequence[Planned]) -> Iterator[Snapshot | None]:
    """Copy the code once for all elements; remove the copy if the block fails."""
    snapshot, words = None, "--no-snapshot keeps none"
    if plan.snapshot:
        before = read_json(again[0].run.record) if again else None
        source = Path(str((before or {}).get("folder") or Path.cwd()))
        snapshot, words = take_snapshot(RunDirectory(plan.folder), source)
        if words:
            say_aside(f"hpcrun: {words}")
    if snapshot is None and plan.config.job.same_code:
        why = words or "there is no git work tree"
        raise RunError(
            f"job.same_code: no copy of the code can be compared: {why}; submit from a git work tree, or set "
            "job.same_code=false"
        )
    try:
        yield snapshot
    except BaseException:
        if snapshot is not None:
            shutil.rmtree(snapshot.root, ignore_errors=True)
            directory.remove_if_empty([snapshot.root.parent])
        raise


def shared_code(folder: Path, snapshot: Snapshot | None) -> dict[str, Any] | None:
    """Return the record of the snapshot in a new element."""
    if snapshot is None:
        return None
    return {
        "root": f"../{snapshot.root.relative_to(folder)}",
        "source": str(snapshot.source),
        "progress": 0,
        "trained": None,
        "changed": [],
    }


def identity_of(plan: SweepPlan) -> tuple[dict[str, Any], str]:
    folder = Path.cwd()
    facts = record.describe(masked_words([*sys.orig_argv]), plan.executor, folder)
    return facts, record.uncommitted_diff(folder)


@contextmanager
def admitted(
    one: Planned,
    snapshot: Snapshot | None,
    identity: tuple[dict[str, Any], str],
    keeps_code: bool,
    trust_owner: bool,
    fitted: dict[str, Config],
) -> Iterator[None]:
    """Prepare an element that has run before for another start; restore it if the block fails.

    Raises:
        RunError: it is a run of another config, or of another user.
    """
    run, config = one.run, one.element.config
    directory.refuse_if_writable_by_others(run)
    if not trust_owner:
        directory.refuse_foreign(run)
    with put_back_on_failure(run), renewed(run, config, lambda: identity):
        facts = directory.read_record(run)
        before = facts.get("code")
        code = None if snapshot is None else compared(run, config, snapshot, before)
        own = {"snapshot": keeps_code, "code": code, **_swept(one)}
        write_hashed(run.record, facts | own)
        write_atomic(run.config, with_comment_crc(one.element.text))
        if (script := _script(one, fitted)) is not None:
            run.batch_script.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(run.batch_script, script)
        run.result.unlink(missing_ok=True)
        yield


def new_run(one: Planned, fitted: dict[str, Config]) -> NewRun:
    """Return the run directory to make."""
    return NewRun(one.run.path.name, one.element.text, _script(one, fitted), _swept(one))


def _swept(one: Planned) -> dict[str, Any]:
    """Return the swept parameters of a command for ``run.json``, because the config lacks them."""
    if not one.element.template:
        return {}
    values, command = one.element.values, [*one.element.template]
    return {"sweep": {"values": values, "command": command}}


def _script(one: Planned, fitted: dict[str, Config]) -> str | None:
    """Return the batch script that continues the run if Slurm forbids a requeue; None on this machine."""
    if not fitted:
        return None
    config, own = fitted[job_key(one.element.config)], one.element.config.job
    alone = config.model_copy(update={"job": shared_job(config.job, 1, own)})
    return batch_script(batch_request(one.run, alone))


@contextmanager
def no_new_logs_on_failure(folder: Path) -> Iterator[None]:
    """Remove the folder of the batch scripts if the block created it and fails."""
    logs = RunDirectory(folder).logs
    there = logs.exists()
    try:
        yield
    except BaseException:
        if not there:
            shutil.rmtree(logs, ignore_errors=True)
        raise
