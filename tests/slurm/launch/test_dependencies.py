"""``--after RUN`` with different clusters, with substitutes for Slurm's programs."""

import os
from pathlib import Path

import pytest

from hpcrun.errors import LaunchError
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.events import Attempt, record_event
from hpcrun.slurm.launch.stopping import unfinished_runs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs on a host of cluster `here`, which also reaches cluster `big`; job 7 runs on both."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for program, line in {
        "scontrol": "[ \"$2\" = config ] && echo 'ClusterName = here'",
        "squeue": "echo '7|RUNNING|n1|N/A|1:00|None|a'",
        "sacct": "true",
    }.items():
        (tmp_path / program).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / program).chmod(0o755)
    return tmp_path


def running_on(cluster: str, folder: Path) -> RunDirectory:
    run = create(folder / "first", "x", {})
    record_event(run, "submitted", attempt=Attempt("7", 0), executor="slurm", cluster=cluster)
    return run


@pytest.mark.parametrize(("there", "wanted"), [("here", None), ("here", "here"), ("big", "big")])
def test_a_run_on_the_same_cluster_is_waited_for(
    here: Path, there: str, wanted: str | None
) -> None:
    run = running_on(there, here)
    assert unfinished_runs([run], "slurm", wanted) == [run]


@pytest.mark.parametrize(
    ("there", "wanted", "words"),
    [
        ("big", None, "runs on cluster big, and a job on this host's cluster cannot wait"),
        ("here", "big", "runs on this host's cluster, and a job on cluster big cannot wait"),
        ("big", "here", "runs on cluster big, and a job on cluster here cannot wait"),
        ("here", "here,big", "runs on this host's cluster, and a job on cluster here,big cannot"),
    ],
)
def test_a_run_on_another_cluster_cannot_be_waited_for(
    here: Path, there: str, wanted: str | None, words: str
) -> None:
    with pytest.raises(LaunchError) as refused:
        unfinished_runs([running_on(there, here)], "slurm", wanted)
    assert str(refused.value).startswith(f"--after first: {words}")
    assert str(refused.value).count("\n") == 0
