"""The environment of a task of the local cluster: Slurm's variables, so that code sees no difference."""

import socket
import time

from hpcrun.slurm.local.job_files import JobRequest
from hpcrun.slurm.local.survivors import MARK


def host_name(node: int) -> str:
    """Return the name of a node of the local cluster."""
    return f"local{node}"


def job_environment(request: JobRequest, restart: int) -> dict[str, str]:
    """Return the variables of the whole job (sbatch(1), "Output environment variables")."""
    tasks = request.nodes * request.tasks_per_node
    hosts = host_name(0) if request.nodes == 1 else f"local[0-{request.nodes - 1}]"
    layout = str(request.tasks_per_node)
    if request.nodes > 1:
        layout += f"(x{request.nodes})"
    environ = {
        "HPCRUN_LOCAL_CLUSTER": "1",
        MARK: request.folder,
        "SLURM_JOB_ID": request.job_id,
        "SLURM_JOBID": request.job_id,
        "SLURM_CLUSTER_NAME": "local",
        "SLURM_JOB_NUM_NODES": str(request.nodes),
        "SLURM_NNODES": str(request.nodes),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_TASKS_PER_NODE": layout,
        "SLURM_SUBMIT_HOST": socket.gethostname(),
    }
    if restart:
        # Slurm leaves the variable unset in the first attempt.
        environ["SLURM_RESTART_COUNT"] = str(restart)
    if request.cpus_per_task:
        environ["SLURM_CPUS_PER_TASK"] = str(request.cpus_per_task)
    if request.time_limit is not None:
        environ["SLURM_JOB_END_TIME"] = str(int(time.time() + request.time_limit))
    return environ


def step_environment(request: JobRequest, rank: int) -> dict[str, str]:
    """Return the variables of one task (srun(1), "Output environment variables")."""
    node, local_rank = divmod(rank, request.tasks_per_node)
    shared = job_environment(request, 0)
    environ = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": shared["SLURM_JOB_NODELIST"],
        "SLURM_STEP_NUM_NODES": shared["SLURM_NNODES"],
        "SLURM_STEP_NUM_TASKS": shared["SLURM_NTASKS"],
        "SLURM_STEP_TASKS_PER_NODE": shared["SLURM_TASKS_PER_NODE"],
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURMD_NODENAME": host_name(node),
    }
    if request.devices is not None:
        on_node = len(request.devices) // request.nodes
        mine = request.devices[node * on_node : (node + 1) * on_node]
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    return environ
