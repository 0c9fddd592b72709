"""The relation of an existing run to a config of the same name: continue, or refuse.

The functions import what only an existing run needs, so that the submission of a new run does not.
"""

import re
from collections.abc import Sequence

from hpcrun.api.places import handle
from hpcrun.config import Config, changes_since, lengths_left, training_differences
from hpcrun.config import load_resolved as load
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.files import read_json
from hpcrun.run.sweep_file import is_sweep

_REMEDY = "; choose another --name"


class OtherConfigError(RunError):
    """A run trains something else."""


def finished_result(run: RunDirectory) -> dict[str, object] | None:
    """Return the result of ``run`` if it is finished; else None."""
    result = read_json(run.result)
    return result if result is not None and result.get("state") == "finished" else None


def compare(run: RunDirectory, config: Config) -> dict[str, object] | None:
    """Return the result of ``run`` if it is finished, else None: ``config`` may continue it.

    Raises:
        RunError: its checkpoints are gone; OtherConfigError: it has another config.
    """
    done, steps = finished_result(run), saved_steps(run)
    stands = max(steps, default=0)
    old = load(run.config)
    differences = training_differences(old, config, None if done else stands)
    if not differences:
        if not done and not steps:
            _require_none_lost(run)
        return done
    reported = f"{run.path}: is a run of another config ({shortened(differences)})"
    if done:
        reported += ", and finished"
    elif stands:
        reported += f"; {stands} {'step is' if stands == 1 else 'steps are'} done"
        left = lengths_left(old, config, stands)
        reported += f", and {left}" if left else ""
    reported += f"{_REMEDY}, or continue it as it is with `hpcrun resume {handle(run)}`"
    # hpcrun does not see the files that a script saves.
    empty = not (done or stands or old.command)
    raise OtherConfigError(f"{reported}, or remove the folder" if empty else reported)


def numbered(base: RunDirectory, config: Config) -> RunDirectory:
    """Return the run for a ``config`` without a given name: ``base``, ``base-2``, ``base-3`` and so on.

    It is the run of this config, or else ``base`` if nothing has the name, or else a new run.
    """
    name = re.compile(re.escape(base.path.name) + r"-([2-9]|[1-9]\d+)")
    near = base.path.parent.glob(f"{base.path.name}-*")
    numbers = sorted(int(found[1]) for path in near if (found := name.fullmatch(path.name)))
    runs = [RunDirectory(base.path.with_name(f"{base.path.name}-{number}")) for number in numbers]
    taken = f"{base.path}: a sweep has the name"
    for run in filter(RunDirectory.exists, [base, *runs]):
        try:
            compare(run, config)
            return run
        except OtherConfigError as error:
            taken = str(error).partition(_REMEDY)[0] if run == base else taken
    if not base.exists() and not is_sweep(base.path):
        return base
    new = RunDirectory(base.path.with_name(f"{base.path.name}-{max(numbers, default=1) + 1}"))
    say_aside(f"hpcrun: {taken}; the new run is {new.name}")
    return new


def require_unchanged(run: RunDirectory, config: Config) -> None:
    """Check that ``config`` still is the config of ``run``; like :func:`compare`, but for a resume.

    Raises:
        RunError: the run has another config now, or had one when it saved, or its checkpoints are gone.
    """
    if load(run.config) != config:
        raise RunError(
            f"{run.path}: another command changed its config just now; run `hpcrun resume` again"
        )
    _require_as_saved(run, config)
    if not saved_steps(run):
        _require_none_lost(run)


def shortened(differences: Sequence[str]) -> str:
    """Return the first few of ``differences``, for one line."""
    return "; ".join(differences[:3]) + (" …" if len(differences) > 3 else "")


def _require_none_lost(run: RunDirectory) -> None:
    from hpcrun.storage.lost import require_none_lost

    require_none_lost(run, handle(run))


def _require_as_saved(run: RunDirectory, config: Config) -> None:
    """Raise RunError for a config that the ranks would refuse."""
    from hpcrun.storage.manifest import newest_manifest

    newest = newest_manifest(run.checkpoints)
    if newest is None:
        return
    found = changes_since(newest.meta.get("config"), config, newest.step)
    if found is not None and found.refused:
        raise RunError(found.refusal(run.config, newest.step))


def saved_steps(run: RunDirectory) -> list[int]:
    from hpcrun.storage.store import CheckpointStore

    return CheckpointStore(run.checkpoints, "submit-0").steps()
