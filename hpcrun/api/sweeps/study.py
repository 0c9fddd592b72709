"""A search with Optuna: each trial is a run of the sweep, and the number of the trial is the name of the run.

All state is in the folder of the sweep: the values and the decisions in Optuna's journal, all else in the run
directories. So the same command continues a search that was killed at any point.
"""

import math
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from hpcrun.api.cancellation import note_end
from hpcrun.api.run import Run
from hpcrun.api.submission.choose_config import SubmitRequest, config_layers
from hpcrun.api.sweeps.handover import submit_sweep
from hpcrun.api.sweeps.plan import SweepPlan, check_limit, plan_sweep
from hpcrun.api.sweeps.request import RowBlock, SweepRequest, row_of, text_of
from hpcrun.api.sweeps.search import JOURNAL, Search, suggested
from hpcrun.config import ConfigError, Layer, load_resolved, training_differences
from hpcrun.errors import LaunchError, UserError
from hpcrun.printing import Progress
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.journal.journal import Journal
from hpcrun.run.lock_file import LockFile
from hpcrun.run.snapshot import recorded_snapshot
from hpcrun.run.sweep_file import SweepRun, read_sweep
from hpcrun.slurm.launch import jobs
from hpcrun.slurm.launch.batch_script import element_name
from hpcrun.slurm.launch.jobs import RunState, pauses
from hpcrun.slurm.local.tasks import local_devices

if TYPE_CHECKING:
    from optuna.trial import Trial

# Seconds to the first look after a change; Slurm's controller serves many users.
_LOOK = {"slurm": 5.0, "local": 0.5}
_ENDED = ("finished", "failed", "pruned")


class _Counts(TypedDict):
    counts: dict[str, int]
    best: str | None
    left: list[str]


class StudyEnd(_Counts, total=False):
    """The end of a study: the number of trials by state, the best run, and the runs that are ``left``.

    ``value`` of the metric and ``values`` of the keys: only with a best run.
    """

    value: float | None
    values: Mapping[str, object]


@dataclass(frozen=True)
class StudyPlan:
    """A checked search that has not begun; ``layers``: the sources of the config, which are read once."""

    request: SubmitRequest
    search: Search
    layers: Sequence[Layer]
    folder: Path

    def of_trial(self, number: int, values: Mapping[str, object]) -> SweepPlan:
        """Return the plan for a trial, with the code of the first run: a search compares values only."""
        sweep = SweepRequest([RowBlock([row_of(values)], self.search.place("search.space"))])
        # The limit of a sweep holds within a submission, and each trial is a submission.
        request = replace(self.request, max_parallel=None)
        first = self.first_run()
        code = recorded_snapshot(self.run_of(int(first.name))) if first else None
        return plan_sweep(request, sweep, [element_name(number)], self.layers, code)

    def first_run(self) -> SweepRun | None:
        """Return the first run of the search; None if there is none yet."""
        known = read_sweep(self.folder)
        return known.runs[0] if known else None

    def run_of(self, number: int) -> RunDirectory:
        """Return the run directory of a trial."""
        return RunDirectory(self.folder / element_name(number))


def plan_study(request: SubmitRequest, search: Search) -> tuple[StudyPlan, SweepPlan]:
    """Return the plan for ``search`` over the config of ``request``, and the plan of its first run.

    Raises:
        UserError: a range, a key or the config is wrong, or the folder has another sweep or search.
    """
    *_, space = search.objects()
    values = {key: (getattr(one, "choices", None) or [one.low])[0] for key, one in space.items()}
    layers = config_layers(request)
    check_limit(request)
    first = StudyPlan(request, search, layers, request.runs).of_trial(0, values)
    plan = StudyPlan(request, search, layers, first.folder)
    kept = plan.first_run()
    if kept is not None and not (plan.folder / JOURNAL).exists():
        raise RunError(f"{plan.folder}: is a sweep without a search; choose another --name")
    if kept is not None and (run := plan.run_of(int(kept.name))).exists():
        differing = sorted(kept.values.keys() ^ space.keys())
        if not differing:
            first = plan.of_trial(int(kept.name), kept.values)
            differing = training_differences(load_resolved(run.config), first.config)
        if differing:
            words = f"is a search with other keys or values ({differing[0]})"
            raise RunError(f"{plan.folder}: {words}; choose another --name")
    at_once, place = request.max_parallel or 1, request.place("max_parallel")
    if at_once > 1 and first.executor == "local" and local_devices(first.config):
        raise UserError(f"{place}: the trials of a search share this machine's GPUs; omit it")
    return plan, first


def run_study(
    plan: StudyPlan, report: Callable[[str], None], progress: Progress = lambda *_: None
) -> StudyEnd:
    """Submit trials, and follow them until the study has all its trials.

    Args:
        report: gets a line for each change, and at the end a line for the best run.
        progress: called at each look with the number of trials that have ended, and that of the study.

    Returns:
        ``counts`` of the trials by Optuna's states, ``best`` (the run; None without a complete trial) with
        its ``value`` and ``values``, and ``left``: runs that the same command continues.

    Raises:
        UserError: another process runs the study, the scheduler refuses a trial while no trial runs, or the
            metric is missing.
        OSError: a file cannot be written.
        KeyboardInterrupt: Ctrl-C; the jobs continue, and the same command continues the study.
    """
    folder, new = plan.folder, not plan.folder.exists()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    busy = f"{folder}: {{holder}} runs this search; watch it with `hpcrun status {folder.name}`"
    try:
        with LockFile(folder / "study.lock", busy):
            return _Study(plan, report, progress).run()
    except KeyboardInterrupt as interrupt:
        # A submission inside may say that nothing was submitted: true for its trial only.
        words = f"the jobs of {folder.name} continue, and the same command continues the search"
        raise KeyboardInterrupt(words) from interrupt
    finally:
        if new and read_sweep(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)


class _Study:
    """``_waiting``: trials to submit. ``_running``: trials to follow. ``_ending``: pruned runs with a job."""

    def __init__(self, plan: StudyPlan, report: Callable[[str], None], progress: Progress) -> None:
        self._plan, self._report, self._metric = plan, report, plan.search.metric
        self._progress = progress
        *_, self._space = plan.search.objects()
        self._study, self._trial = plan.search.open_study(plan.folder)
        self._waiting: deque[Trial] = deque()
        self._running: dict[int, Trial] = {}
        self._left: list[str] = []
        self._ending: set[RunDirectory] = set()
        self._asks = True

    def run(self) -> StudyEnd:
        """Run until all trials have ended."""
        self._waiting += map(self._trial, self._in_state("RUNNING"))
        pause, executor = None, "local"
        while True:
            self._fill()
            open_trials = len(self._in_state("RUNNING", "WAITING"))
            ended = len(self._study.get_trials(deepcopy=False)) - open_trials
            self._progress(ended, self._plan.search.trials)
            if not self._running:
                return self._end()
            states = self._look()
            executor = next((now.executor for now in states if now.executor in _LOOK), executor)
            if pause is None or not all(now.live for now in states):
                pause = pauses(executor, _LOOK[executor])
            time.sleep(next(pause) if self._running else 0)

    def _in_state(self, *names: str) -> list[int]:
        trials = self._study.get_trials(deepcopy=False)
        return [trial.number for trial in trials if trial.state.name in names]

    def _fill(self) -> None:
        """Submit trials while there is room, and take up those of a killed search."""
        from optuna.trial import TrialState

        while len(self._running) < (self._plan.request.max_parallel or 1):
            if not self._waiting:
                begun = len(self._study.trials) - len(self._in_state("WAITING"))
                if not self._asks or begun >= self._plan.search.trials:
                    break
                self._waiting.append(self._study.ask())
            trial = self._waiting[0]
            run, values = self._plan.run_of(trial.number), suggested(trial, self._space)
            now = jobs.state(run) if run.exists() else None
            if now is None or not (
                now.live or now.word in _ENDED or Journal(run).read().was_pruned
            ):
                try:
                    submit_sweep(self._plan.of_trial(trial.number, values))
                except LaunchError as error:
                    if not self._running:
                        raise
                    self._report(f"{run.name} is not submitted yet: {error}")
                    break
                except ConfigError as error:
                    # Other values may be valid, so the search continues.
                    self._study.tell(self._waiting.popleft(), state=TrialState.FAIL)
                    self._report(f"trial {trial.number} is refused: {error}")
                    continue
                self._report(f"{run.name} is submitted: {_shown(values)}")
            self._running[trial.number] = self._waiting.popleft()

    def _look(self) -> list[RunState]:
        """Report new values to Optuna, prune, and record ends; return the states."""
        runs = {number: self._plan.run_of(number) for number in self._running}
        states = jobs.states(runs.values())
        for (number, run), now in zip(runs.items(), states, strict=True):
            trial = self._running[number]
            # Also if the search was killed after the decision and before the cancellation.
            pruned = Journal(run).read().was_pruned
            if (not pruned and self._has_to_end(trial, run, now)) or (pruned and now.live):
                self._prune(run)
            if not now.live:
                self._record(trial, run, now, pruned)
                del self._running[number]
        return states

    def _has_to_end(self, trial: "Trial", run: RunDirectory, now: RunState) -> bool:
        """Report the new values of ``run``; return True if the pruner ends the trial, which still runs."""
        if self._plan.search.pruner == "NopPruner":
            return False
        known = self._study.get_trials(deepcopy=False)[trial.number].intermediate_values
        for step, value in self._values(run, since=max(known, default=None)):
            trial.report(value, step)
            # At each step, because pruners decide at certain steps.
            if now.live and trial.should_prune():
                self._report(f"{run.name} is pruned at step {step}")
                return True
        return False

    def _values(self, run: RunDirectory, since: int | None = None) -> list[tuple[int, float]]:
        """Return step and metric, NaN for null; a step that was computed again is there once."""
        lines = [line for line in Run(run).metrics(since=since) if self._metric in line]
        found = {
            line["step"]: line[self._metric] for line in lines if type(line.get("step")) is int
        }
        if not all(isinstance(value, int | float | None) for value in found.values()):
            raise UserError(f"{run.metrics}: {self._metric} is no number; correct search.metric")
        if found and "metric" not in self._study.user_attrs:
            # From now on another metric is refused: Optuna would compare different quantities.
            self._study.set_user_attr("metric", self._metric)
        return [(step, math.nan if one is None else float(one)) for step, one in found.items()]

    def _prune(self, run: RunDirectory) -> None:
        if run in self._ending:
            return
        try:
            Run(run).cancel(prune=True, wait=False)
            self._ending.add(run)
        except UserError as error:
            # The job may have ended; the next look shows the end.
            self._report(str(error))

    def _record(self, trial: "Trial", run: RunDirectory, now: RunState, pruned: bool) -> None:
        """Report the end of a run to Optuna; a run that may continue stays open."""
        from optuna.trial import TrialState

        if now.word == "cancelled" and pruned:
            # The job was waiting, so no other process writes the result.
            note_end(run)
            now = jobs.state(run)
        detail = f": {now.detail}" if now.detail else ""
        if now.word == "finished":
            found = self._values(run)
            if not found:
                words = "correct search.metric, and run the command again"
                raise UserError(f"{run.metrics}: has no {self._metric}; {words}")
            value = found[-1][1]
            state = TrialState.COMPLETE if math.isfinite(value) else TrialState.FAIL
            self._study.tell(trial, value if math.isfinite(value) else None, state)
            detail = f": {self._metric}={value:.6g}"
        elif now.word in _ENDED:
            ends = {"failed": TrialState.FAIL, "pruned": TrialState.PRUNED}
            self._study.tell(trial, state=ends[now.word])
        else:
            self._left.append(run.name)
            # Who cancels a run wants no other run in its place.
            self._asks &= now.word != "cancelled"
        self._report(f"{run.name} is {now.word}{detail}")

    def _end(self) -> StudyEnd:
        trials = self._study.get_trials(deepcopy=False)
        counts = dict(Counter(trial.state.name.lower() for trial in trials))
        end: StudyEnd = {"counts": counts, "best": None, "left": self._left}
        shown = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        self._report(f"{self._plan.folder.name}: {len(trials)} trials: {shown}")
        if "complete" in counts:
            best = self._study.best_trial
            name = self._plan.run_of(best.number).name
            end["best"], end["value"], end["values"] = name, best.value, best.params
            self._report(f"best: {name}: {self._metric}={best.value:.6g} {_shown(best.params)}")
        if self._left:
            self._report(f"the same command continues {', '.join(self._left)}")
        return end


def _shown(values: Mapping[str, object]) -> str:
    return " ".join(f"{key}={text_of(value)}" for key, value in values.items())
