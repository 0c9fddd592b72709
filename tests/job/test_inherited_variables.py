"""The variables of Slurm that a job keeps."""

from hpcrun.job.opening import own_variables

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
    assert own_variables(ENVIRON | left, {}) == ENVIRON
    left |= {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "4"}
    expected = ENVIRON | {"SLURM_RESTART_COUNT": "0"}
    assert own_variables(ENVIRON | left, SHOWN) == expected
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}
    assert own_variables(ENVIRON | array, SHOWN | {"ArrayJobId": "5"}) == ENVIRON | array
