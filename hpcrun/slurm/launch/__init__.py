"""From a run directory to running processes: Slurm, the local cluster, or this process."""
