"""An upgrade while a job runs on the local cluster: no process of the job mixes old and new code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from tests.support.jobs import PATIENCE, held_at, outcome, probe_config, wait_for_end, write_probe
from tests.support.upgrades import NEWER, install, mixed, upgrade


# CI runs this on Slurm: tests/on_slurm/test_upgrade.py.
@pytest.mark.slow
@pytest.mark.parametrize("then", ["preempt", "nothing"])
def test_a_job_outlives_an_upgrade(then: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install(site)

    def python(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True,
            text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip

    write_probe(tmp_path)
    (tmp_path / "empty.yaml").write_text("{}\n")
    settings = probe_config(tmp_path, job__nodes=1, checkpoint__every=5)
    words = ["submit", "--detach", "-c", "empty.yaml", "--name", "a", *settings]
    done = python("-m", "hpcrun", *words)
    assert done.returncode == 0, done.stderr
    run = RunDirectory(tmp_path / "runs" / "a")
    with held_at(run, 12):
        upgrade(site)
        assert python("-m", "hpcrun", "--version").stdout == f"hpcrun {NEWER}\n"
        if then == "preempt":
            assert python("-m", "hpcrun", "preempt", "a").returncode == 0
    wait_for_end(run)
    assert mixed(run) == []
    causes = ["preempted", "finished"] if then == "preempt" else ["finished"]
    state, found = outcome(run)
    assert state == "finished"
    assert len(found) == len(causes)


def test_the_check_of_these_tests_notices_a_mixture(tmp_path: Path) -> None:
    install(tmp_path)
    program = (
        "import hpcrun.errors, tests.support.upgrades, pathlib; "
        f"tests.support.upgrades.upgrade(pathlib.Path({str(tmp_path)!r})); import hpcrun.job.policy"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {root!r}]; {program}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "an old process imports hpcrun.job" in done.stderr
