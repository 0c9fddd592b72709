"""The srun that prepares the nodes of a Slurm job."""

import shlex
import subprocess
from pathlib import Path

import pytest

from hpcrun.errors import ClusterError
from hpcrun.slurm.node_setup import (
    Component,
    components,
    node_setup_command,
    node_setup_script,
)


def test_one_task_a_node_runs_the_lines_with_the_jobs_environment() -> None:
    folder = Path("/runs/50%/logs/7/restart-0")
    command = node_setup_command([Component(3)], ["mkdir -p /tmp/x"], folder)
    assert command[:5] == ["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1",
                           "--kill-on-bad-exit=1"]  # fmt: skip
    assert "--output=/runs/50%%/logs/7/restart-0/node-setup-%N.log" in command
    program, option, script = command[-3:]
    assert (program, option) == ("bash", "-c")
    assert script.splitlines()[-1] == "mkdir -p /tmp/x"


def test_the_first_line_that_fails_ends_it_and_the_node_is_named(tmp_path: Path) -> None:
    late = tmp_path / "late"
    script = node_setup_script(["false || true", "exit 3", f"touch {shlex.quote(str(late))}"])
    done = subprocess.run(
        ["bash", "-c", script], env={"SLURMD_NODENAME": "n7", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == "hpcrun: node_setup failed on n7 with exit code 3\n"
    assert not late.exists()


HETEROGENEOUS = {
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-5]",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "n[6,8]",
}
PLAIN = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ([], {0: 1, 1: 4, 2: 2}),
        (["--het-group=1"], {1: 4}),
        (["--mpi=pmix", "--het-group=0,2"], {0: 1, 2: 2}),
        (["--het-group 1-2"], {1: 4, 2: 2}),
    ],
)
def test_the_components_of_the_ranks_are_prepared(
    options: list[str], groups: dict[int, int]
) -> None:
    found = components(HETEROGENEOUS, options)
    assert found == [Component(nodes, (f"--het-group={group}",)) for group, nodes in groups.items()]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ([], Component(4)),
        (["--mpi=pmix", "--cpu-bind=cores"], Component(4)),
        (["--nodes=2"], Component(2)),
        (["-N1", "-w n3"], Component(1, ("--nodelist=n3",))),
        (["--nodelist=n[2-3]"], Component(2, ("--nodelist=n[2-3]",))),
        (["--exclude=n[4-9]"], Component(3, ("--exclude=n[4-9]",))),
        (["--relative=1"], Component(3, ("--relative=1",))),
    ],
)
def test_options_that_choose_nodes_for_the_ranks_choose_them_here_too(
    options: list[str], part: Component
) -> None:
    assert components(PLAIN, options) == [part]


@pytest.mark.parametrize("groups", ["a", "0-", "0,3"])
def test_groups_that_the_job_lacks_are_refused(groups: str) -> None:
    with pytest.raises(ClusterError, match=f"job.srun_args: --het-group={groups}: "):
        components(HETEROGENEOUS, [f"--het-group={groups}"])


def test_the_components_are_parts_of_one_step() -> None:
    parts = [Component(1, ("--het-group=0",)), Component(2, ("--het-group=1",))]
    command = node_setup_command(parts, ["true"], Path("/logs"))
    split = command.index(":")
    assert command.count("srun") == 1
    assert command[1:5] == ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--het-group=0"]
    assert command[split + 1 : split + 5] == [
        *("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--het-group=1")
    ]
    assert command[split - 1] == command[-1]
