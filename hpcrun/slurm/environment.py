"""Clean the environment before a submission, and quote variables for a batch script.

A job submitted from inside another job inherits its SLURM_* variables, and sbatch and srun take
them for options: an inherited SLURM_CPU_BIND silently costs a factor of three. A person's own defaults
for sbatch (SBATCH_ACCOUNT in a shell's profile) would override the batch script, so hpcrun
reads them instead of passing them on.
"""

from collections.abc import Mapping

KEPT = frozenset({"SLURM_CONF"})
"""It names the cluster's configuration, and not the job of this process."""

_OF_RANKS = frozenset(
    {
        "SLURM_CPUS_PER_TASK",
        "SLURM_GPUS_PER_TASK",
        "SLURM_TRES_PER_TASK",
        "SLURM_NTASKS_PER_GPU",
        "SLURM_NTASKS_PER_NODE",
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE",
    }
)
_PREFIXES = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SRUN_",
    "PMI_",
    "PMI2_",
    "PMIX_",
    "TORCHELASTIC_",
    "OMPI_COMM_WORLD_",
    "OMPI_MCA_ess_",
    "OMPI_MCA_orte_",
)
# Slurm sets these in a job (from 23.11 on), so that mpirun starts its processes through srun. Outside
# of a job they are a person's own. No shorter prefix: HYDRA_FULL_ERROR belongs to a config library.
_TOLD_TO_MPI = (
    "HYDRA_BOOTSTRAP",
    "HYDRA_LAUNCHER",
    "I_MPI_HYDRA_BOOTSTRAP",
    "OMPI_MCA_plm_slurm_",
    "PRTE_MCA_plm_slurm_",
)
_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_NAME",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMPI_UNIVERSE_SIZE",
        "HPCRUN_LOCAL_CLUSTER",
        "HPCRUN_LOCAL_JOB",
        "HPCRUN_GPU_JOB",
        "HPCRUN_IN_PLACE",
        "HPCRUN_JOB_NAME",
        "HPCRUN_FORK_SERVER",
        "HPCRUN_MEMORY_KEEPER",
        "HPCRUN_TASKS",
        "HPCRUN_SUBMITTED",
    }
)
# If two variables have the same key, the later wins, as in sbatch.
_DEFAULTS = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_TIMELIMIT": "time",
}
# Values for "no time limit". A job of hpcrun always has a limit, because the warning precedes it.
_UNLIMITED = ("infinite", "unlimited", "-1")


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of another launcher about its own processes.

    Dropped: variables of Slurm (SLURM_*, SLURMD_*, SBATCH_*, SRUN_*), of PMI, torchrun, OpenMPI
    and of the local cluster; inside a job also those that Slurm sets for mpirun. Kept: everything else, and
    SLURM_CONF.
    """
    prefixes = _PREFIXES + _TOLD_TO_MPI if "SLURM_JOB_ID" in environ else _PREFIXES
    return {
        name: value
        for name, value in environ.items()
        if name in KEPT or not (name in _NAMES or name.startswith(prefixes))
    }


def sbatch_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a person gives sbatch defaults, and the key of each below ``job:``.

    Empty inside a job: there the variables may come from the submission of that job.
    """
    if "SLURM_JOB_ID" in environ:
        return {}
    return {
        name: key
        for name, key in _DEFAULTS.items()
        if environ.get(name) and not (key == "time" and environ[name].strip().lower() in _UNLIMITED)
    }


def export_from_environment(variables: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return shell lines that export ``variables``, and the environment from which the lines take the values.

    ps(1) shows the arguments of a shell to every user of a node, but its environment to its user only. ``srun
    --export`` splits values at their commas.
    """
    lines, environ = [], {}
    for name, value in variables.items():
        carrier = f"HPCRUN_VALUE_OF_{name}"
        environ[carrier] = value
        lines.append(f'export {name}="${carrier}"; unset {carrier}')
    return lines, environ


def without_rank_requests(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` for a step of another shape than the ranks' step.

    srun takes a job's requests for each rank from the environment, and would give a task that serves a whole
    node the resources of one rank.
    """
    return {name: value for name, value in environ.items() if name not in _OF_RANKS}
