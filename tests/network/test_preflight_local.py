"""A preflight on this machine: by hand, and before the ranks of a local job."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun.cli.commands import preflight
from hpcrun.config import Config, to_yaml
from hpcrun.diagnose.causes import blames_node
from hpcrun.diagnose.launching import launch_failure
from hpcrun.job.bad_nodes import record_bad_nodes
from hpcrun.job.finalize import finalize
from hpcrun.job.policy import Budgets
from hpcrun.network.preflight import PreflightFacts
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import create
from hpcrun.run.files import read_json
from hpcrun.run.journal.events import Cause
from hpcrun.run.reports import record_report
from hpcrun.slurm.avoided_nodes import bad_nodes_path, node_failures
from tests.cli.test_bad_input import require_one_line
from tests.support import jobs
from tests.support.journal import read_events, record_event


def test_two_processes_of_this_machine_are_checked(tmp_path: Path) -> None:
    done = jobs.hpcrun("preflight", "--local", "2", "--gpus", "0", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["nodes"] == ["local0", "local1"]
    passed = {one["check"] for one in report["results"] if one["status"] == "pass"}
    assert passed >= {"starts", "gpus", "gemm", "run directory", "versions"}
    products = [
        one
        for node in report["nodes"]
        for one in report["found"][node]
        if one.get("what") == "product"
    ]
    assert len(products) == 2
    assert len({one["value"] for one in products}) == 1
    assert list(tmp_path.iterdir()) == []


def test_gpus_that_are_not_there_fail(tmp_path: Path) -> None:
    env = {"CUDA_VISIBLE_DEVICES": ""}
    done = jobs.hpcrun("preflight", "--local", "1", "--gpus", "2", cwd=tmp_path, env=env)
    assert done.returncode == 1, done.stdout
    assert "local0: 0 of 2 GPUs are visible" in done.stdout
    assert done.stdout.splitlines()[-1] == "--exclude=local0"
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--local 2"),
        (["--local", "0"], "1 to 64"),
        (["--local", "1", "--gpus", "-1"], "at least 0"),
        (["nowhere", "--local", "1"], "there is no such run"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: list[str], expected: str) -> None:
    require_one_line(jobs.hpcrun("preflight", *words, cwd=tmp_path), expected)


def test_a_report_with_a_failure_is_the_attempt_s_cause(
    tmp_path: Path,
) -> None:
    line = "preflight on n2: ecc: GPU 0: 5 uncorrected ECC errors"
    record_report(tmp_path, {"cause": line, "unfit": {"n2": "ecc", "n5": "pcie"}})
    found = launch_failure("", "", worked=False, logs=tmp_path)
    assert found is not None
    assert (found.line, found.host, found.unfit) == (line, "n2", ("n2", "n5"))
    assert blames_node(found)
    record_report(tmp_path, {"cause": line, "unfit": {}})
    found = launch_failure("", "", worked=False, logs=tmp_path)
    assert found is not None
    assert not blames_node(found)
    record_report(tmp_path, {"cause": None, "unfit": {}})
    assert launch_failure("", "", worked=False, logs=tmp_path) is None


def test_unfit_nodes_use_the_budget_of_node_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run, first = create(tmp_path / "a", "x", {}), Attempt("7", 0)
    folder = run.attempt_logs(Attempt("7", 0))
    folder.mkdir(parents=True)
    line = "preflight on n2: ecc: GPU 0: 5 uncorrected ECC errors"
    record_report(folder, {"cause": line, "unfit": {"n2": "ecc", "n5": "pcie"}})
    classification = finalize(run, first, 1, Budgets(crash=0))
    assert (classification.cause, classification.line) == (Cause.NODE_FAILURE, line)
    assert classification.decision.restart
    assert read_events(run)[-1].host == "n2"
    record_bad_nodes(run, first, classification)
    assert [one.node for one in node_failures(bad_nodes_path(), 0.0)] == ["n2", "n5"]
    # A failure that is the same on all nodes is the job's fault.
    record_report(folder, {"cause": "preflight: gpus: 0 of 4", "unfit": {}})
    assert finalize(run, first, 1, Budgets(crash=0)).cause is Cause.CRASH


def test_a_local_job_is_checked_before_its_ranks(tmp_path: Path) -> None:
    changes = {"job.preflight": True, "job.nodes": 1, "job.gpus": 1, "train.steps": 6}
    run = jobs.submit_probe(tmp_path, "checked", **changes)
    jobs.wait_for(lambda: (read_json(run.result) or {}).get("state") == "finished")
    (log,) = run.logs.glob("*/restart-0/preflight.log")
    assert "hpcrun: preflight: 1 node checked in" in log.read_text()
    report = read_json(log.with_suffix(".json")) or {}
    assert report["fit"]
    assert "run directory" in {one["check"] for one in report["found"]["local0"]}
    assert list(log.parent.glob("rank-00000.log"))


@pytest.fixture
def warned() -> Iterator[None]:
    """Keep the handlers of the warnings, which a preflight before the ranks replaces."""
    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("warned")
@pytest.mark.parametrize(
    ("before", "during", "code"),
    [
        ([("submitted", "7")], [], 0),
        ([("submitted", "7")], [("cancelled", "7")], 1),
        ([("opened", "7")], [("cancelled", "7")], 1),
        ([("opened", "7"), ("cancelled", "7")], [], 1),
        ([("cancelled", "7"), ("opened", "7")], [], 0),
        ([("cancelled", "6"), ("submitted", "7")], [("cancelled", "6")], 0),
    ],
)
def test_a_job_canceled_in_preflight_starts_no_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: list[tuple[str, str]],
    during: list[tuple[str, str]],
    code: int,
) -> None:
    run = create(tmp_path / "a", to_yaml(Config()), {})

    def record(events: list[tuple[str, str]]) -> None:
        for what, job in events:
            record_event(run, what, attempt=Attempt(job, 0))

    def check(*_: object, **__: object) -> PreflightFacts:
        record(during)
        return PreflightFacts(["n1"], silent={"n1": "srun: error: step killed"})

    record(before)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n1")
    monkeypatch.setattr(preflight, "check_nodes", check)
    arguments = argparse.Namespace(before_ranks=True, run=run.path, gpus=None, local=None, check=[])
    assert preflight.run(arguments) == code
