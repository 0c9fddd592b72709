"""What a run that is there already makes of a config of its name: it goes on, makes room, or refuses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.checkpoint.store import CheckpointStore
from hpcrun.cli.runs import handle
from hpcrun.config import Config, lengths_left, training_differences
from hpcrun.config import load_resolved as load
from hpcrun.launch import jobs
from hpcrun.lifecycle.history import last_committed
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import read_events
from hpcrun.run.files import read_json, write_atomic, write_json

Identity = Callable[[], tuple[Mapping[str, Any], str]]
"""What run.json and uncommitted.patch are to say of a submission."""


@dataclass(frozen=True)
class Standing:
    """``finished``: the result of a run that is done. ``replaced``: what differs in a config whose place
    another one takes, since nothing was ever saved by it."""

    finished: dict[str, Any] | None = None
    replaced: Sequence[str] = ()


def compare(run: RunDirectory, config: Config) -> Standing:
    """How ``run`` stands to ``config``.

    Raises:
        RunError: it trains something else.
    """
    result = read_json(run.result)
    done = result is not None and result.get("state") == "finished"
    steps = CheckpointStore(run.checkpoints, "submit-0").steps()
    stands = max(steps, default=0)
    old = load(run.config)
    differences = training_differences(old, config, None if done else stands)
    if not differences:
        return Standing(finished=result if done else None)
    if not done and not steps and _saved_nothing(run, old):
        return Standing(replaced=training_differences(old, config))
    told = f"{run.path}: is a run of another config ({shortened(differences)})"
    if done:
        told += ", and finished"
    elif stands:
        told += f"; {stands} {'step is' if stands == 1 else 'steps are'} done"
        left = lengths_left(old, config, stands)
        told += f", and {left}" if left else ""
    raise RunError(
        f"{told}; choose another --name, or continue it as it is with `hpcrun resume {handle(run)}`"
    )


@contextmanager
def renewed(run: RunDirectory, config: Config, identity: Identity) -> Iterator[Sequence[str]]:
    """Compare again, now that no job holds ``run`` and nobody submits it; make room if nothing was saved.

    The block is given what differs in the config whose place this one takes. Where it fails, what was put
    aside is put back; run.json and uncommitted.patch are the caller's to put back.

    Raises:
        RunError: it trains something else.
    """
    found = compare(run, config)
    if not found.replaced:
        yield ()
        return
    # A process that outlived its job may commit until the moment when the run is no longer its own.
    run.owner.unlink(missing_ok=True)
    found = compare(run, config)
    with _put_aside(run):
        facts, diff = identity()
        before = read_json(run.record) or {}
        replaces = {key: before.get(key) for key in ("created", "command")}
        write_json(run.record, {**facts, "replaces": {**replaces, "changed": [*found.replaced]}})
        if diff:
            write_atomic(run.diff, diff)
        else:
            run.diff.unlink(missing_ok=True)
        yield found.replaced


@contextmanager
def unchanged(run: RunDirectory, config: Config) -> Iterator[Sequence[str]]:
    """As :func:`renewed`, of a run that ``config`` was read from.

    Raises:
        RunError: it has another one by now.
    """
    if load(run.config) != config:
        raise RunError(f"{run.path}: somebody has just given it another config; resume it again")
    yield ()


def shortened(differences: Sequence[str]) -> str:
    """The first few of ``differences``, for a line."""
    return "; ".join(differences[:3]) + (" …" if len(differences) > 3 else "")


@contextmanager
def _put_aside(run: RunDirectory) -> Iterator[None]:
    """Put what a config has left beside its job's logs, where another takes its place; back on a failure.

    Raises:
        OSError: it cannot be moved.
    """
    job = jobs.current_job(run)
    folder = run.logs if job is None else run.job_logs(job[1])
    moved: list[tuple[Path, Path]] = []
    try:
        for path in run.measured:
            if path.exists():
                # Beside the logs that tell of it, and out of the way of what the new config will measure.
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                target = folder / path.name
                path.rename(target)
                moved.append((path, target))
        yield
    except BaseException:
        for path, target in moved:
            target.rename(path)
        raise


def _saved_nothing(run: RunDirectory, config: Config) -> bool:
    """Whether no step was ever saved, not even one that has been removed since."""
    events = read_events(run)
    if config.command:
        # What a script saves by its own means nobody here sees.
        return all(event.what != "opened" for event in events)
    return last_committed(events) is None
