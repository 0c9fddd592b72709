"""The relation of an existing run to a config of the same name: continue, replace, or refuse.

The functions import what only an existing run needs, so that the submission of a new run does not.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.api.places import handle
from hpcrun.config import Config, changes_since, lengths_left, training_differences
from hpcrun.config import load_resolved as load
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import read_json, write_atomic, write_hashed
from hpcrun.run.sweep_file import is_sweep

_REMEDY = "; choose another --name"
Identity = Callable[[], tuple[Mapping[str, Any], str]]
"""Return the contents of run.json and uncommitted.patch for a submission."""


class OtherConfigError(RunError):
    """A run trains something else."""


@dataclass(frozen=True)
class Standing:
    """``finished``: the result of a finished run. ``replaced``: the differences from a config that the new
    config replaces, because nothing was ever saved with it. ``saved``: a resume continues from a step."""

    finished: dict[str, Any] | None = None
    replaced: Sequence[str] = ()
    saved: bool = False


def compare(run: RunDirectory, config: Config) -> Standing:
    """Compare ``run`` with ``config``.

    Raises:
        RunError: its checkpoints are gone; OtherConfigError: it has another config and saved steps.
    """
    result = read_json(run.result)
    done = result is not None and result.get("state") == "finished"
    steps = _steps(run)
    stands = max(steps, default=0)
    old = load(run.config)
    differences = training_differences(old, config, None if done else stands)
    if not differences:
        if not done and not steps:
            _require_none_lost(run)
        return Standing(finished=result if done else None, saved=bool(steps))
    if not done and not steps and _saved_nothing(run, old):
        return Standing(replaced=training_differences(old, config))
    reported = f"{run.path}: is a run of another config ({shortened(differences)})"
    if done:
        reported += ", and finished"
    elif stands:
        reported += f"; {stands} {'step is' if stands == 1 else 'steps are'} done"
        left = lengths_left(old, config, stands)
        reported += f", and {left}" if left else ""
    raise OtherConfigError(
        f"{reported}{_REMEDY}, or continue it as it is with `hpcrun resume {handle(run)}`"
    )


def standing_of(run: RunDirectory, config: Config) -> Standing | None:
    """Return :func:`compare`; None if there is no run."""
    return compare(run, config) if run.exists() else None


def numbered(base: RunDirectory, config: Config) -> tuple[RunDirectory, Standing | None]:
    """Return the run for a ``config`` without a given name: ``base``, ``base-2``, ``base-3`` and so on.

    It is the run of this config, or else ``base`` if no other training has it, or else a new run.
    """
    name = re.compile(re.escape(base.path.name) + r"-([2-9]|[1-9]\d+)")
    near = base.path.parent.glob(f"{base.path.name}-*")
    numbers = sorted(int(found[1]) for path in near if (found := name.fullmatch(path.name)))
    runs = [RunDirectory(base.path.with_name(f"{base.path.name}-{number}")) for number in numbers]
    taken = f"{base.path}: a sweep or another job has the name"
    standings: dict[RunDirectory, Standing | None] = {}
    for run in [base, *runs]:
        try:
            standings[run] = standing = standing_of(run, config)
        except OtherConfigError as error:
            taken = str(error).partition(_REMEDY)[0] if run == base else taken
            continue
        if standing is not None and not standing.replaced:
            return run, standing
    from hpcrun.slurm.launch import jobs

    if base in standings and not is_sweep(base.path) and not jobs.state(base).live:
        return base, standings[base]
    new = RunDirectory(base.path.with_name(f"{base.path.name}-{max(numbers, default=1) + 1}"))
    say_aside(f"hpcrun: {taken}; the new run is {new.name}")
    return new, None


@contextmanager
def renewed(run: RunDirectory, config: Config, identity: Identity) -> Iterator[Sequence[str]]:
    """Compare again while no job has ``run`` and no other submission runs; replace it if nothing was saved.

    Yields the differences from the replaced config. If the block fails, moved files are moved back; the
    caller restores run.json and uncommitted.patch.

    Raises:
        RunError: the run trains something else.
    """
    found = compare(run, config)
    if not found.replaced:
        yield ()
        return
    # A process that outlived its job can commit as long as it owns the run.
    run.owner.unlink(missing_ok=True)
    found = compare(run, config)
    with _put_aside(run, run.measured):
        facts, diff = identity()
        before = read_json(run.record) or {}
        replaces = {key: before.get(key) for key in ("created", "command")}
        write_hashed(run.record, {**facts, "replaces": {**replaces, "changed": [*found.replaced]}})
        if diff:
            write_atomic(run.diff, diff)
        else:
            run.diff.unlink(missing_ok=True)
        yield found.replaced


@contextmanager
def unchanged(run: RunDirectory, config: Config) -> Iterator[Sequence[str]]:
    """Check that ``config`` still is the config of ``run``; like :func:`renewed`, but for a resume.

    Raises:
        RunError: the run has another config now, or had one when it saved, or its checkpoints are gone.
    """
    if load(run.config) != config:
        raise RunError(
            f"{run.path}: another command changed its config just now; run `hpcrun resume` again"
        )
    _require_as_saved(run, config)
    if not _steps(run):
        _require_none_lost(run)
    yield ()


def shortened(differences: Sequence[str]) -> str:
    """Return the first few of ``differences``, for one line."""
    return "; ".join(differences[:3]) + (" …" if len(differences) > 3 else "")


@contextmanager
def _put_aside(run: RunDirectory, paths: Iterable[Path]) -> Iterator[None]:
    """Move ``paths`` into the log folder of the newest job, and back on a failure.

    Raises:
        OSError: a path cannot be moved.
    """
    from hpcrun.slurm.launch import jobs

    job = jobs.current_job(run)
    folder = run.logs if job is None else run.job_logs(job[1])
    moved: list[tuple[Path, Path]] = []
    try:
        for path in paths:
            if path.exists():
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                target = _free_name(folder / path.name)
                path.rename(target)
                moved.append((path, target))
        yield
    except BaseException:
        for path, target in moved:
            target.rename(path)
        raise


def _free_name(path: Path) -> Path:
    """Return ``path``, or the first free name with a number appended."""
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(name for name in itertools.chain([path], names) if not os.path.lexists(name))


def _require_none_lost(run: RunDirectory) -> None:
    from hpcrun.job.ownership import require_none_lost

    require_none_lost(run, handle(run))


def _require_as_saved(run: RunDirectory, config: Config) -> None:
    """Raise RunError at once for a config that the ranks would refuse."""
    from hpcrun.checkpoint.storage.manifest import newest_manifest

    newest = newest_manifest(run.checkpoints)
    if newest is None:
        return
    found = changes_since(newest.meta.get("config"), config, newest.step)
    if found is not None and found.refused:
        raise RunError(found.refusal(run.config, newest.step))


def _steps(run: RunDirectory) -> list[int]:
    from hpcrun.checkpoint.storage.store import CheckpointStore

    return CheckpointStore(run.checkpoints, "submit-0").steps()


def _saved_nothing(run: RunDirectory, config: Config) -> bool:
    """Return True if no step was ever saved, not even a step that was removed later."""
    from hpcrun.job.history import last_committed
    from hpcrun.run.events import read_events

    events = read_events(run)
    if config.command:
        # hpcrun does not see the files that a script saves.
        return all(event.what != "opened" for event in events)
    return last_committed(events) is None
