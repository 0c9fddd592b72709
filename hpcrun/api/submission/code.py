"""The copy of the code that a submission keeps, and its differences from the code of the last saved step."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrun.api.places import handle
from hpcrun.api.submission.continuing import shortened
from hpcrun.config import Config
from hpcrun.job.history import last_committed
from hpcrun.printing import say_aside
from hpcrun.run.code.changes import changes
from hpcrun.run.code.snapshot import Snapshot, take_snapshot
from hpcrun.run.directory import RunDirectory, RunError, read_record
from hpcrun.run.events import Event, read_events
from hpcrun.run.io.files import write_hashed


def keep_code(run: RunDirectory, config: Config, wanted: bool | None) -> None:
    """Copy the code of the submission's folder to the run directory, if wanted, and record the copy.

    Args:
        wanted: None: as in the previous submission.

    Raises:
        RunError: the code cannot be copied, or differs although ``job.same_code`` is set; no copy remains.
    """
    facts = read_record(run)
    if wanted is None:
        wanted = facts.get("snapshot") is not False
    facts["snapshot"] = wanted
    try:
        snapshot, words = None, "--no-snapshot keeps none"
        if wanted:
            snapshot, words = take_snapshot(run, Path(str(facts.get("folder") or Path.cwd())))
            if words:
                say_aside(f"hpcrun: {words}")
        if snapshot is None:
            if config.job.same_code:
                why = words or "there is no git work tree"
                raise RunError(
                    f"job.same_code: no copy of the code can be compared: {why}; submit from a git work "
                    "tree, or set job.same_code=false"
                )
            write_hashed(run.record, {**facts, "code": None})
            return
        try:
            code = compared(run, config, snapshot, facts.get("code"))
        except BaseException:
            shutil.rmtree(snapshot.root, ignore_errors=True)
            raise
        write_hashed(run.record, {**facts, "code": code})
    except OSError as error:
        raise RunError(
            f"{error.filename or run.code}: cannot be copied to the run: {error.strerror or error}; "
            "correct that, or run the code in place with --no-snapshot"
        ) from error


def compared(run: RunDirectory, config: Config, snapshot: Snapshot, before: Any) -> dict[str, Any]:
    """Return the record of ``snapshot``; print its differences from the code of the last saved step."""
    events = read_events(run)
    progress = _progress(events, config)
    trained = _trained(before, progress) if isinstance(before, dict) else None
    step = last_committed(events)
    whose = "of the previous start" if step is None else f"of step {step}"
    found: Sequence[str] = ()
    if trained is not None and (run.path / trained).is_dir():
        found = changes(run.path / trained, snapshot.root)
    elif progress and config.job.same_code:
        raise RunError(
            f"{run.path}: there is no copy of the code {whose} to compare with (job.same_code); submit with "
            "job.same_code=false"
        )
    if found:
        link = " from" if all(one.endswith(("differ", "differs")) for one in found) else ": not"
        told = f"{shortened(found)}{link} the code {whose}"
        if config.job.same_code:
            raise RunError(
                f"{run.path}: {told} (job.same_code); put the code back as in {run.path / str(trained)}, or "
                f"submit with job.same_code=false"
            )
        say_aside(f"hpcrun: {handle(run)}: {told}; the run continues with the new code")
    return {
        # A sweep keeps one copy, next to its elements.
        "root": os.path.relpath(snapshot.root, run.path),
        "source": str(snapshot.source),
        "progress": progress,
        "trained": trained,
        "changed": [*found],
    }


def _progress(events: Sequence[Event], config: Config) -> int:
    """Return a number that grows with each saved step, or for a script with each start."""
    kind = "opened" if config.command else "saved"
    return sum(event.what == kind for event in events)


def _trained(before: Mapping[str, Any], progress: int) -> str | None:
    """Return the copy of the code that saved the newest step."""
    if progress > int(before.get("progress") or 0):
        return str(before.get("root"))
    trained = before.get("trained")
    return None if trained is None else str(trained)
