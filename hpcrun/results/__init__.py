"""Collection of runs into one file, statistics over seeds, plots and the report."""

from importlib.util import find_spec

from hpcrun.errors import ResultsError


def require(extra: str, *packages: str) -> None:
    """Raise ResultsError, with the command that installs ``extra``, if one of ``packages`` is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ResultsError(f'{missing[0]} is not installed: `pip install "hpcrun[{extra}]"`')
