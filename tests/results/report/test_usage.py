"""Accounting's records of real jobs (``tools/recordlib/usage.py`` ran them), and the table of the report."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun.results.report.efficiency import Efficiency, efficiency
from hpcrun.results.report.page import efficiency_table
from hpcrun.results.report.runs import ReportedRun, open_results, read_runs
from hpcrun.run.events import Attempt, Event
from hpcrun.slurm import AttemptUsage, parse_sacct_usage

from .conftest import MakeRun

RECORDED = Path(__file__).parents[2] / "slurm" / "recorded"


class Recorded:
    """The jobs of one version of Slurm by scene, and accounting's records by job id."""

    def __init__(self, version: str) -> None:
        folder = RECORDED / version
        self.jobs: Mapping[str, str] = json.loads((folder / "sacct-usage.json").read_text())
        self.usage: dict[str, list[AttemptUsage]] = {}
        for one in parse_sacct_usage((folder / "sacct-usage.txt").read_text()):
            self.usage.setdefault(one.job_id, []).append(one)

    def used(self, run: ReportedRun, job: str) -> Efficiency:
        """Return the efficiency of ``run`` as if it had been ``job``."""
        begin = min(record.start or 0 for record in self.usage[job])
        shift = begin - min(event.time for event in run.events)
        events = [
            replace(event, time=event.time + shift, attempt=event.attempt and Attempt(job, 0))
            for event in run.events
        ]
        return efficiency(replace(run, events=events), self.usage)


@pytest.fixture(params=["22.05", "26.05"])
def recorded(request: pytest.FixtureRequest) -> Recorded:
    """Return the recordings of each version."""
    return Recorded(request.param)


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path) -> ReportedRun:
    """Return a finished run on Slurm that asked for what the recorded jobs asked for."""
    make_run("a", config={"job": {"nodes": 2, "cpus_per_task": 2, "mem": "512M", "time": "10"}})
    with open_results([str(tmp_path / "runs")], tmp_path) as store:
        (found,) = read_runs(store)
    return replace(found, executor="slurm")


def test_each_attempt_and_element_is_a_record(recorded: Recorded) -> None:
    states = {job: [record.state for record in records] for job, records in recorded.usage.items()}
    array = recorded.jobs["array"]
    assert states == {
        recorded.jobs["requeued"]: ["PREEMPTED", "CANCELLED"],
        recorded.jobs["finished"]: ["COMPLETED"],
        recorded.jobs["failed"]: ["FAILED"],
        recorded.jobs["cancelled"]: ["CANCELLED"],
        f"{array}_0": ["COMPLETED"],
        f"{array}_1": ["FAILED"],
    }


def test_a_finished_job_used_what_it_computed(recorded: Recorded) -> None:
    (record,) = recorded.usage[recorded.jobs["finished"]]
    assert (record.nodes, record.cpus, record.gpus) == (2, 4, 2)
    # Two tasks computed for six seconds each, of 70 s, and held 64 MiB each.
    assert record.cpu_seconds == pytest.approx(12, abs=0.5)
    assert 70 <= record.elapsed < 75
    assert (record.time_limit, record.memory_asked) == (600, 1024 << 20)
    assert record.memory_used is not None
    assert 128 << 20 < record.memory_used < 160 << 20
    # Shorter than accounting's interval: the memory is not measured.
    assert recorded.usage[recorded.jobs["failed"]][0].memory_used is None


def test_the_table_has_the_use_of_a_finished_job(run: ReportedRun, recorded: Recorded) -> None:
    found = recorded.used(run, recorded.jobs["finished"])
    assert found.advice == ("job.cpus_per_task=1 (used 0.2 of 4 CPUs)",)
    cells = {name: column[0] for name, column in efficiency_table([found]).items()}
    assert cells["GPUs asked"] == "2"
    assert (cells["CPUs asked"], cells["CPUs used"]) == ("4", "0.2")
    assert cells["memory per node requested"] == "512 MiB"
    assert cells["memory per node used"] == "≤ 72 MiB"
    assert cells["time limit"] == "0:10:00"
    assert found.accounted
    assert "GPUs busy" not in cells


def test_a_requeued_job_has_its_longer_attempts_use(run: ReportedRun, recorded: Recorded) -> None:
    found = recorded.used(run, recorded.jobs["requeued"])
    first, second = recorded.usage[recorded.jobs["requeued"]]
    assert first.elapsed > 60 > second.elapsed
    assert found.cpus_used == pytest.approx(4 / first.elapsed, abs=0.01)
    assert found.memory_used == (first.memory_used or 0) / 2


@pytest.mark.parametrize(("nodes", "gpus"), [("2-4", 6), (2, 4)])
def test_a_range_counts_the_nodes_of_its_largest_attempt(
    make_run: MakeRun, tmp_path: Path, nodes: int | str, gpus: int
) -> None:
    make_run("a", config={"job": {"nodes": nodes, "gpus": 2, "cpus_per_task": 4}})
    with open_results([str(tmp_path / "runs")], tmp_path) as store:
        (found,) = read_runs(store)
    opened = [
        Event("opened", 1.0, Attempt("7", at), None, None, {"nodes": count})
        for at, count in enumerate((2, 3, 2))
    ]
    run = replace(found, executor="slurm", events=[*found.events, *opened])
    assert (efficiency(run, {}).gpus, efficiency(run, {}).cpus) == (gpus, 4 * gpus)
