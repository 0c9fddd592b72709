"""The srun that prepares the nodes of a Slurm job."""

import shlex
import subprocess
from pathlib import Path

from hpcrun.cluster.node_setup import node_setup_command, node_setup_script


def test_one_task_a_node_runs_the_lines_with_the_jobs_environment() -> None:
    folder = Path("/runs/50%/logs/7/restart-0")
    command = node_setup_command(3, ["mkdir -p /tmp/x"], {"STAGE": "/tmp/it's"}, folder)
    assert command[:5] == ["srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1",
                           "--kill-on-bad-exit=1"]  # fmt: skip
    assert "--output=/runs/50%%/logs/7/restart-0/node-setup-%N.log" in command
    program, option, script = command[-3:]
    assert (program, option) == ("bash", "-c")
    assert script.splitlines()[0].startswith("export STAGE=")
    assert script.splitlines()[-1] == "mkdir -p /tmp/x"


def test_the_first_line_that_fails_ends_it_and_the_node_is_named(tmp_path: Path) -> None:
    late = tmp_path / "late"
    script = node_setup_script(["false || true", "exit 3", f"touch {shlex.quote(str(late))}"], {})
    done = subprocess.run(
        ["bash", "-c", script], env={"SLURMD_NODENAME": "n7", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == "hpcrun: node_setup failed on n7 with exit code 3\n"
    assert not late.exists()
