"""The batch step: the process of a Slurm job that starts the ranks, classifies their end and requeues."""
