"""The variables of Slurm that a job keeps."""

import subprocess
from pathlib import Path

import pytest

from hpcrun.slurm.batch_environment import Origin, origin_of_script, own_variables

SHOWN = {"JobId": "7", "Restarts": "0", "NumTasks": "4"}
ENVIRON = {
    "HOME": "/home/me",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_NTASKS": "4",
    "SLURM_GPUS_PER_NODE": "2",
    "SLURM_HINT": "nomultithread",
}


def test_a_binding_that_the_batch_script_sets_reaches_srun() -> None:
    own = ENVIRON | {"SLURM_CPU_BIND": "cores", "SLURM_MEM_BIND": "local"}
    assert own_variables(own, SHOWN) == own
    inherited = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_CPU_BIND_TYPE": "mask_cpu:",
        "SLURM_CPU_BIND_LIST": "0x1",
    }
    assert own_variables(ENVIRON | inherited, SHOWN) == ENVIRON


def test_the_names_of_another_job_are_dropped() -> None:
    left = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "SLURM_MEM_PER_NODE": "800"}
    left |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_EXPORT_ENV": "NONE"}
    kept = {name: value for name, value in ENVIRON.items() if name != "SLURM_HINT"}
    assert own_variables(ENVIRON | left, {}) == kept
    left |= {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "4"}
    expected = kept | {"SLURM_RESTART_COUNT": "0"}
    assert own_variables(ENVIRON | left, SHOWN) == expected
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    assert own_variables(ENVIRON | array, SHOWN | {"ArrayJobId": "5"}) == ENVIRON | array


STEP = {"SLURM_SRUN_COMM_HOST": "10.0.0.1"}
LINE = {"SubmitLine": "sbatch -N2 -c2 train.sbatch runs/a"}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "SLURM_CPU_BIND",
            "SLURM_MEM_BIND",
            "SLURM_HINT",
            "SLURM_DISTRIBUTION",
            "SLURM_THREADS_PER_CORE",
            "SLURM_TRES_BIND",
        ),
        *(
            "SLURM_GPU_BIND",
            "SLURM_MPI_TYPE",
            "SLURM_OVERLAP",
            "SLURM_WAIT",
        ),
    ],
)
def test_options_of_the_submitting_step_do_not_reach_srun(name: str) -> None:
    home = {"HOME": "/home/me", "SLURM_JOB_ID": "7", **STEP}
    for shown in ({}, SHOWN, SHOWN | LINE):
        assert own_variables(home | {name: "x"}, shown) == home
        # The batch script has set the variable for srun.
        changed = own_variables(home | {name: "x"}, shown, Origin(home | {name: "y"}))
        assert changed[name] == "x"


@pytest.mark.parametrize(
    ("name", "value", "lines", "line", "own"),
    [
        ("SLURM_HINT", "nomultithread", [], "sbatch --hint nomultithread a.sh", True),
        ("SLURM_HINT", "nomultithread", ["--hint=nomultithread"], "sbatch a.sh", True),
        ("SLURM_HINT", "nomultithread", [], "sbatch a.sh --hints", False),
        ("SLURM_DISTRIBUTION", "cyclic", [], "sbatch -m cyclic a.sh", True),
        ("SLURM_DISTRIBUTION", "cyclic", [], "sbatch -N2 a.sh", False),
        # An enclosing batch job has no step; "cpus-per-task set by two different environment variables".
        ("SLURM_TRES_PER_TASK", "cpu=3", [], "sbatch -N2 a.sh", False),
        ("SLURM_TRES_PER_TASK", "cpu=3", [], "sbatch -c3 a.sh", True),
        ("SLURM_GPUS_PER_TASK", "1", [], "sbatch --gpus-per-n=1 a.sh", False),
        ("SLURM_GPUS_PER_TASK", "1", [], "sbatch --gpus-per-t=1 a.sh", True),
        # Slurm 22.05 shows no line: outside of a step the option may be the job's own.
        ("SLURM_HINT", "nomultithread", [], None, True),
        ("SLURM_CPUS_PER_TASK", "3", [], None, False),
        ("SLURM_CPUS_PER_TASK", "2", [], None, True),
    ],
)
def test_the_options_of_the_job_itself_stay(
    name: str, value: str, lines: list[str], line: str | None, own: bool
) -> None:
    shown = SHOWN | {"CPUs/Task": "2"} | ({} if line is None else {"SubmitLine": line})
    found = own_variables({"SLURM_JOB_ID": "7", name: value}, shown, Origin(None, lines))
    assert (name in found) is own


def test_the_origin_is_read_from_the_shell_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "a script.sh"
    script.write_text("#!/bin/bash\n#SBATCH --hint='x y' -m block # why\n#SBATCH -c 2\nread line\n")
    with subprocess.Popen(["bash", str(script)], stdin=subprocess.PIPE, env={"A": "1=2"}) as shell:
        origin = origin_of_script(shell.pid)
        shell.communicate(b"\n")
    assert origin == Origin({"A": "1=2"}, ["--hint=x y", "-m", "block", "-c", "2"])
    assert origin_of_script(shell.pid) == Origin()
