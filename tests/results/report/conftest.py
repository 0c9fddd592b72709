"""Run directories for the tests of plots and reports."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpcrun.config import Config, to_yaml
from hpcrun.results.report.runs import ReportedRun, iterate_runs, open_results
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import append_line, write_json

MakeRun = Callable[..., RunDirectory]
START = 1_700_000_000.0


def add_event(run: RunDirectory, what: str, at: float, restart: int = 0, **fields: Any) -> None:
    """Append an event of job 7 at ``at`` seconds after the start."""
    line = {"time": START + at, "event": what, "job": "7", "restart": restart}
    append_line(run.events, line | fields)


def add_history(run: RunDirectory, state: str | None) -> None:
    """Append the events of a run: a preemption after the first save, then the end."""
    add_event(run, "submitted", 0)
    add_event(run, "opened", 10, executor="local", nodes=1, ranks=1)
    add_event(run, "started", 15, step=0)
    add_event(run, "saved", 40, step=20, seconds=1.0)
    add_event(run, "ended", 50, cause="preemption", restart_allowed=True)
    add_event(run, "opened", 60, restart=1, executor="local", nodes=1, ranks=1)
    add_event(run, "started", 65, restart=1, step=20)
    if state == "finished":
        add_event(run, "saved", 90, restart=1, step=40, seconds=1.0)
        add_event(run, "finished", 91, restart=1)
        add_event(run, "ended", 92, restart=1, cause="finished", restart_allowed=False)
    elif state is not None:
        add_event(run, "ended", 80, restart=1, cause="crash", restart_allowed=False)


def write_run(
    folder: Path,
    name: str,
    *,
    seed: int = 0,
    state: str | None = "finished",
    level: float = 1.0,
    config: Mapping[str, Any] | None = None,
    reason: str = "",
    losses: Sequence[float | None] | None = None,
) -> RunDirectory:
    """Write a run of 8 logged steps; ``losses`` replaces the values that ``level`` and ``seed`` give."""
    values = Config.model_validate({"name": "x", "seed": seed, **(config or {})})
    run = create(folder / name, to_yaml(values), {"created": START, "executor": "local"})
    add_history(run, state)
    noise = random.Random(seed)
    falling = [level * (1 / number + 0.01 * noise.random()) for number in range(1, 9)]
    for number, loss in enumerate(losses or falling, 1):
        line = {"step": number * 5, "time": START + 15 + number, "restart": 0}
        line |= {"loss": loss, "lr": 0.1}
        append_line(run.metrics, line | {"tokens_per_second": 1000.0 + number, "memory_gb": 0.5})
    if state is not None:
        ended = {"state": state, "cause": "crash", "reason": reason, "time": START + 92}
        write_json(run.result, ended)
    return run


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that makes a run of 8 logged steps below ``tmp_path / "runs"``."""
    return partial(write_run, tmp_path / "runs")


def read(folder: Path) -> list[ReportedRun]:
    """Return the runs below ``folder``."""
    with open_results([str(folder)], folder) as store:
        return list(iterate_runs(store))
