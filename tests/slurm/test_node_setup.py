"""The srun that prepares the nodes of a Slurm job."""

import shlex
import subprocess
from pathlib import Path

import pytest

from hpcrun.slurm.node_setup import (
    node_setup_command,
    node_setup_script,
)


def test_one_task_per_node_runs_the_lines() -> None:
    folder = Path("/runs/50%/logs/7/restart-0")
    command = node_setup_command({"SLURM_NNODES": "3"}, [], ["mkdir -p /tmp/x"], folder)
    assert command[:5] == ["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1",
                           "--kill-on-bad-exit=1"]  # fmt: skip
    assert "--output=/runs/50%%/logs/7/restart-0/node-setup-%N.log" in command
    program, option, script = command[-3:]
    assert (program, option) == ("bash", "-c")
    assert script.splitlines()[-1] == "mkdir -p /tmp/x"


def test_the_first_line_that_fails_names_the_node(tmp_path: Path) -> None:
    late = tmp_path / "late"
    script = node_setup_script(["false || true", "exit 3", f"touch {shlex.quote(str(late))}"])
    done = subprocess.run(
        ["bash", "-c", script], env={"SLURMD_NODENAME": "n7", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == "hpcrun: node_setup failed on n7 with exit code 3\n"
    assert not late.exists()


PLAIN = {"SLURM_JOB_NUM_NODES": "4"}


@pytest.mark.parametrize(
    ("options", "nodes", "placing"),
    [
        ([], 4, []),
        (["--mpi=pmix", "--cpu-bind=cores"], 4, []),
        (["--nodes=2"], 2, []),
        (["-N1", "-w n3"], 1, ["--nodelist=n3"]),
        (["--nodelist=n[2-3]"], 2, ["--nodelist=n[2-3]"]),
    ],
)
def test_options_that_choose_nodes_choose_them_here_too(
    options: list[str], nodes: int, placing: list[str]
) -> None:
    command = node_setup_command(PLAIN, options, ["true"], Path("/logs"))
    assert command[1:4] == [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    assert command[4 : 4 + len(placing) + 1] == [*placing, "--kill-on-bad-exit=1"]
