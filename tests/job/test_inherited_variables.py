"""The variables of Slurm that a job keeps, with the real fields of ``scontrol show job`` of Slurm 22.05."""

import pytest

from hpcrun.job.opening import own_variables
from hpcrun.slurm import parse_show_job

# sbatch -N2 --ntasks-per-node=2 --gpus-per-node=2 -c 2
WITH_GPUS = """\
JobId=5 JobName=wrap
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   NumNodes=2 NumCPUs=8 NumTasks=4 CPUs/Task=2 ReqB:S:C:T=0:0:*:*
   TRES=cpu=8,mem=16000M,node=2,billing=8
   Socks/Node=* NtasksPerN:B:S:C=2:0:*:* CoreSpec=*
   MinCPUsNode=4 MinMemoryCPU=2000M MinTmpDiskNode=0
   TresPerNode=gres:gpu:2
"""
PLAIN = """\
JobId=7 JobName=x
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=1,node=1,billing=1
   Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*
"""
ENVIRON = {
    "HOME": "/home/me",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_GPUS_PER_NODE": "2",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_HINT": "nomultithread",
    "SLURM_GPU_BIND": "closest",
}


def test_a_job_keeps_the_options_that_it_was_given() -> None:
    assert own_variables(ENVIRON, parse_show_job(WITH_GPUS)) == ENVIRON
    typed = ENVIRON | {"SLURM_GPUS_PER_NODE": "a100:2"}
    shown = WITH_GPUS.replace("gres:gpu:2", "gres/gpu:a100:2")
    assert own_variables(typed, parse_show_job(shown)) == typed


@pytest.mark.parametrize("kind", ["2080ti", "4090", "1g.10gb", "tesla_v100-sxm2"])
def test_the_name_of_a_gpu_may_begin_with_a_digit(kind: str) -> None:
    shown = parse_show_job(WITH_GPUS.replace("gres:gpu:2", f"gres/gpu:{kind}:2"))
    own = ENVIRON | {"SLURM_GPUS_PER_NODE": f"{kind}:2"}
    assert own_variables(own, shown) == own
    other = ENVIRON | {"SLURM_GPUS_PER_NODE": f"{kind}:4"}
    assert "SLURM_HINT" not in own_variables(other, shown)


def test_a_binding_that_the_batch_script_sets_reaches_srun() -> None:
    own = ENVIRON | {"SLURM_CPU_BIND": "cores", "SLURM_MEM_BIND": "local"}
    assert own_variables(own, parse_show_job(WITH_GPUS)) == own
    inherited = {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_CPU_BIND_TYPE": "mask_cpu:",
        "SLURM_CPU_BIND_LIST": "0x1",
    }
    assert own_variables(ENVIRON | inherited, parse_show_job(WITH_GPUS)) == ENVIRON


def test_options_of_the_submitting_job_are_dropped() -> None:
    left = {"SLURM_GPUS_PER_TASK": "1", "RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    left |= {"SLURM_CPU_BIND_TYPE": "cores", "SLURM_STEP_NODELIST": "n1"}
    left |= {"SLURM_STEP_ID": "0", "SLURM_MEM_PER_NODE": "800", "SLURM_CPU_BIND": "cores"}
    left |= {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "4"}
    own = own_variables(ENVIRON | left, parse_show_job(PLAIN))
    assert own == {
        "HOME": "/home/me",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_RESTART_COUNT": "0",
    }


def test_cores_that_slurm_has_added_for_memory_are_used() -> None:
    shown = parse_show_job(PLAIN.replace("CPUs/Task=1", "CPUs/Task=4"))
    assert own_variables({"SLURM_CPUS_PER_TASK": "1"}, shown) == {"SLURM_CPUS_PER_TASK": "4"}


def test_without_a_controller_only_foreign_variables_are_dropped() -> None:
    step = {"SLURM_STEP_NODELIST": "n1", "SLURM_EXPORT_ENV": "NONE"}
    assert own_variables(ENVIRON | step, {}) == ENVIRON


def test_another_number_of_tasks_proves_no_other_job() -> None:
    shown = parse_show_job(WITH_GPUS.replace("NumTasks=4", "NumTasks=2"))
    assert own_variables(ENVIRON, shown) == ENVIRON
