"""The names of runs for people: a run of a sweep as ``lrs/000``."""

from pathlib import Path

from hpcrun.results.store import ResultsFile
from hpcrun.run.sweep_file import is_sweep


def labels(store: ResultsFile) -> dict[str, str]:
    """Return a different name for each run of ``store``, by the run's key.

    A run of a sweep is ``SWEEP/000`` if the sweep folder is still there. Every other name is the key.
    """
    found: dict[str, str] = {}
    taken: set[str] = set()
    for row in store.table("runs"):
        key, path = row["run"].decode(), Path(row["path"].decode())
        name = f"{path.parent.name}/{path.name}" if is_sweep(path.parent) else key
        found[key] = f"{name} ({key})" if name in taken else name
        taken.add(name)
    return found
