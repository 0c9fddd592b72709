"""Run directories for the tests of the results."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcrun.config import Config, to_yaml
from hpcrun.results.collect.aggregate import RunSource, Summary, aggregate
from hpcrun.results.collect.run_reader import find_runs
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import append_line, write_json
from tests.support.journal import record_event

MakeRun = Callable[..., RunDirectory]


def collect(folder: Path, output: str = "results.h5", **options: Any) -> Summary:
    """Collect the runs below ``folder / "runs"`` in this process."""
    runs = find_runs([str(folder / "runs")], folder)
    return aggregate(RunSource(runs), folder / output, processes=0, **options)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that makes a run below ``tmp_path / "runs"``."""

    def make(
        name: str,
        losses: list[float | None] | None = None,
        *,
        state: str | None = "finished",
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        folder: str = "runs",
    ) -> RunDirectory:
        values = Config.model_validate({"name": "x", "seed": seed, **(config or {})})
        record = {"created": 1000.0 + seed, "executor": "local"}
        run = create(tmp_path / folder / name, to_yaml(values), record)
        if state != "new":
            record_event(run, "opened", attempt=Attempt("7", 0), executor="local")
        for number, loss in enumerate(losses or [], 1):
            append_line(
                run.metrics,
                {"step": number * 10, "time": 1000.0 + number, "restart": 0, "loss": loss},
            )
        if state not in (None, "new"):
            write_json(run.result, {"state": state, "cause": "crash", "time": 2000.0})
        return run

    return make
