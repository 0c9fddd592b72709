"""The plan of a sweep: its elements, their names, and which of them the submission starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from hpcrun.api.submission.choose_config import (
    SubmitRequest,
    config_layers,
    require_packages,
    say_idle,
    warn_of,
)
from hpcrun.api.submission.continuing import compare, finished_result
from hpcrun.api.submission.plan import check, permitted_executor
from hpcrun.api.submission.run_list import RunToStart, Start
from hpcrun.api.submission.sending import job_key
from hpcrun.api.sweeps.configs import Element, element_configs
from hpcrun.api.sweeps.request import SweepRequest, canonical, expand
from hpcrun.api.sweeps.search import JOURNAL
from hpcrun.config import Config, Layer
from hpcrun.config.commands.command import check_command
from hpcrun.errors import UserError
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.snapshot import Snapshot
from hpcrun.run.sweep_file import SweepFile, SweepRun, read_sweep
from hpcrun.slurm.containers import check_image
from hpcrun.slurm.launch import jobs
from hpcrun.slurm.launch.batch_script import element_name
from hpcrun.slurm.launch.submitted import ExecutorName


@dataclass(frozen=True)
class Planned:
    """An element with its run directory.

    ``action``: ``new`` has no run directory yet, ``again`` has failed or stopped; both are submitted.
    The others are ``running``, ``finished``, ``pruned`` and, with ``only_new``, ``left``. ``word``: the
    state of an existing run.
    """

    run: RunDirectory
    element: Element
    action: str
    word: str

    @property
    def submitted(self) -> bool:
        """True if the submission starts the element."""
        return self.action in ("new", "again")

    @property
    def to_start(self) -> RunToStart:
        """The element as a run of a hand-over."""
        element = self.element
        start: Start = "new" if self.action == "new" else "again"
        facts = {}
        if element.template:
            # The config lacks the swept parameters of a command.
            facts["sweep"] = {"values": element.values, "command": [*element.template]}
        return RunToStart(self.run, element.config, element.text, start, facts)


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep before its submission: nothing is written yet.

    ``names``: the names of the elements; empty: by their values. ``code``: the copy of the code; None: a new
    copy.
    """

    request: SubmitRequest
    folder: Path
    executor: ExecutorName
    elements: Sequence[Element]
    names: Sequence[str] = ()
    code: Snapshot | None = None

    @property
    def config(self) -> Config:
        """The config of the first element; the ``job`` section of others may differ."""
        return self.elements[0].config

    def decided(self) -> tuple[SweepFile, list[Planned]]:
        """Return the sweep with its new elements, and the action for each element of this plan.

        An element that exists in the folder keeps its name; new elements get the next numbers.

        Raises:
            RunError: ``sweep.json`` is damaged, or an element of that name has other values.
        """
        before = read_sweep(self.folder) or SweepFile(self.folder, [])
        known = {canonical(run.values): run.name for run in before.runs}
        values = {run.name: canonical(run.values) for run in before.runs}
        number = max((int(run.name) for run in before.runs), default=-1)
        names, runs = [], [*before.runs]
        for element, given in zip_longest(self.elements, self.names):
            name = given or known.get(canonical(element.values))
            if name is None:
                number += 1
                name = element_name(number)
            if name not in values:
                runs.append(SweepRun(name, element.values))
            elif values[name] != canonical(element.values):
                raise RunError(f"{self.folder / name}: has other values; choose another --name")
            names.append(name)
        return SweepFile(self.folder, runs), self._planned(names)

    def _planned(self, names: Sequence[str]) -> list[Planned]:
        runs = [RunDirectory(self.folder / name) for name in names]
        there = [run for run in runs if run.exists()]
        states = dict(zip(there, jobs.states(there), strict=True)) if there else {}
        planned = []
        for run, element in zip(runs, self.elements, strict=True):
            now, action = states.get(run), "new"
            if now is not None:
                action = "running" if now.live else "again"
                if now.word == "pruned":
                    action = "pruned"
                elif not now.live and finished_result(run) is not None:
                    action = "finished"
                elif self.request.only_new and not now.live and now.word != "new":
                    action = "left"
                if action != "again":
                    # An element of another config must not count as an element of this sweep.
                    compare(run, element.config)
            planned.append(Planned(run, element, action, now.word if now else "new"))
        return planned


def plan_sweep(
    request: SubmitRequest,
    sweep: SweepRequest,
    names: Sequence[str] = (),
    layers: Sequence[Layer] | None = None,
    code: Snapshot | None = None,
) -> SweepPlan:
    """Return the plan for ``sweep`` over the config of ``request``.

    Args:
        names: the names of the elements, for a search; empty: by their values.
        layers: the sources of the config, if they have been read.
        code: the copy of the code for new runs; None: a new copy.

    Raises:
        UserError: an axis, a value or the config is wrong, or a single run has the name of the sweep.
    """
    check_limit(request)
    if request.prepare:
        place = request.place("prepare")
        raise UserError(f"{place}: is for one run; give it the name of a run of the sweep")
    layers = config_layers(request) if layers is None else layers
    elements = element_configs(request, sweep, expand(sweep), layers)
    config = elements[0].config
    assert config.name is not None
    warn_of(config.job.env)
    folder = request.runs / config.name
    if RunDirectory(folder).exists():
        raise RunError(f"{folder}: is a single run; choose another --name for the sweep")
    check_command(config, Path.cwd())
    if not names and (folder / JOURNAL).exists():
        raise RunError(f"{folder}: is a search; continue it as before, or choose another --name")
    executor = permitted_executor(config, layers)
    if executor == "debug":
        raise UserError(
            "--executor debug runs one rank in this process; run one element of the sweep with it, or use "
            "--executor local"
        )
    require_packages(config)
    for one in {job_key(element.config): element.config for element in elements}.values():
        check(one, executor, layers)
    check_image(config.job, RunDirectory(folder), Path.cwd(), here=executor == "local")
    say_idle(request, executor)
    return SweepPlan(request, folder, executor, elements, names, code)


def check_limit(request: SubmitRequest) -> None:
    """Raise UserError if ``max_parallel`` is no number of runs."""
    number = request.max_parallel
    if number is not None and (type(number) is not int or number < 1):
        place = request.place("max_parallel")
        raise UserError(f"{place}: should be a whole number, 1 or more, not {number!r}")
