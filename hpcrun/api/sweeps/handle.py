"""A sweep as an object: its runs, their states and results, and methods to end them."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.api.cancellation import cancel_all, wait_for_ends
from hpcrun.api.open_run import run_at
from hpcrun.api.overview import Overview, TableRow, sweep_entries
from hpcrun.api.run import Run, refusing, wait_until
from hpcrun.api.submission.choose_config import PYTHON_COMMAND, SubmitRequest
from hpcrun.config import flag_layer
from hpcrun.errors import UserError
from hpcrun.run.directory import CALLS, RunError, read_record
from hpcrun.run.snapshot import recorded_snapshot
from hpcrun.run.sweep_file import is_sweep
from hpcrun.slurm.launch import jobs

if TYPE_CHECKING:
    from hpcrun.results.frames import Results


class Sweep:
    """A sweep folder with its runs, which :func:`hpcrun.submit` with ``sweep=`` or ``sweep_file=`` returns.

    An object contains a path and nothing else: each method reads the files again. An iteration yields a
    :class:`hpcrun.Run` for each run, in the order of their numbers; ``sweep["003"]`` is one of them.

    Args:
        folder: the sweep folder, such as ``runs/gpt``.

    Raises:
        UserError: the folder is not a sweep folder.
    """

    @refusing
    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        if not is_sweep(self._folder):
            raise RunError(f"{self._folder}: is not the folder of a sweep; see `hpcrun status`")

    @property
    def path(self) -> Path:
        """The absolute path of the sweep folder."""
        return self._folder

    @property
    def name(self) -> str:
        """The name of the sweep, which is the name of its folder."""
        return self._folder.name

    def __repr__(self) -> str:
        return f"<hpcrun.Sweep {str(self.path)!r}>"

    def __fspath__(self) -> str:
        return str(self.path)

    @refusing
    def __iter__(self) -> Iterator[Run]:
        """Return an iterator over the runs."""
        return iter([run_at(entry.run) for entry in sweep_entries(self.path)])

    @refusing
    def __len__(self) -> int:
        """Return the number of runs, submitted or not."""
        return len(sweep_entries(self.path))

    @refusing
    def __getitem__(self, name: str) -> Run:
        """Return the run in the folder ``name``, such as ``000``.

        Raises:
            KeyError: the sweep has no such run.
        """
        entries = {entry.run.path.name: entry for entry in sweep_entries(self.path)}
        if name not in entries:
            raise KeyError(f"{self.name} has no run {name!r}; names are such as '000'")
        return run_at(entries[name].run)

    @property
    def values(self) -> dict[str, Mapping[str, object]]:
        """The swept values of each run: the name of its folder (``000``), and a value for each dotted key."""
        return {entry.run.path.name: entry.values or {} for entry in sweep_entries(self.path)}

    @refusing
    def status(self) -> list[TableRow]:
        """Return the facts of each run as :meth:`hpcrun.Run.status` does, and its ``values``.

        The scheduler is asked once for all runs. A run that cannot be read has the state ``unreadable``.

        Raises:
            UserError: the sweep folder cannot be read.
        """
        return Overview(sweep_entries(self.path)).look()

    @refusing
    def wait(self, timeout: float | None = None) -> dict[str, int]:
        """Wait until no run has a job, restarts included; return the number of runs in each state.

        Args:
            timeout: the longest wait in seconds; None: no limit.

        Raises:
            TimeoutError: a run has not ended after ``timeout`` seconds; all continue.
            UserError: the sweep folder cannot be read.
        """
        made = [entry.run for entry in sweep_entries(self.path) if entry.run.exists()]
        wait_until(made, len(made), timeout, self.name)
        return dict(Counter(state.word for state in jobs.states(made)))

    @refusing
    def cancel(self, *, now: bool = False, wait: bool = True) -> None:
        """End every job of the sweep: the ranks save a checkpoint and stop.

        The same call of :func:`hpcrun.submit` continues the runs.

        Args:
            now: kill the ranks, without a checkpoint.
            wait: return after the end of the jobs.

        Raises:
            UserError: the scheduler refuses, or a job has not ended after its grace time and a minute. All
                other jobs are cancelled.
        """
        found = list(cancel_all(self.path, now=now))
        refused = [one.words for one in found if not one.done]
        if wait:
            live = wait_for_ends([one.run for one in found if one.done])
            refused += [f"{run.name}: the job has not ended; see `hpcrun status`" for run in live]
        if refused:
            raise UserError("\n".join(refused))

    @refusing
    def add(self, values: Mapping[str, object]) -> Run:
        """Submit one more run, with the config and the code of the first run, and return it.

        A run with these values stays as it is if it is finished, pruned or running; else it continues.

        Args:
            values: a value for each key that differs from the first run's config, or that its command uses.

        Raises:
            UserError: a key or a value is wrong, the sweep is a search or of a function, or the scheduler
                refuses; nothing has changed.
        """
        from hpcrun.api.sweeps.handover import submit_sweep
        from hpcrun.api.sweeps.plan import plan_sweep
        from hpcrun.api.sweeps.request import sweep_request

        first = next(iter(sweep_entries(self.path))).run
        if (self.path / CALLS).is_dir():
            raise UserError(f"{self.name}: has calls of a function; use hpcrun.map_array again")
        template = (read_record(first).get("sweep") or {}).get("command", ())
        request = SubmitRequest(
            file=first.config,
            options=flag_layer({"name": (self.name, "add()")}),
            command=template,
            command_place=PYTHON_COMMAND,
            profile="",
            runs=self.path.parent,
        )
        sweep = sweep_request({key: [value] for key, value in values.items()}, None)
        plan = plan_sweep(request, sweep, code=recorded_snapshot(first))
        return run_at(submit_sweep(plan).planned[0].run)

    @refusing
    def results(self) -> "Results":
        """Return the results of all runs, with a tidy frame for runs, metrics and events.

        The call writes ``results.h5`` in the sweep folder, or brings it up to date. ``runs()`` of the
        returned object has a row for each run, with the config as columns.

        Raises:
            UserError: pandas is not installed, or the sweep folder cannot be written.
        """
        from hpcrun.results.collect.aggregate import RunSource, aggregate
        from hpcrun.results.collect.run_reader import find_runs
        from hpcrun.results.frames import load_results

        output = self.path / "results.h5"
        aggregate(RunSource(find_runs([str(self.path)], self.path.parent)), output, processes=0)
        return load_results(output)
