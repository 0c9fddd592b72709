"""The batch step: the one process of a Slurm job that starts the ranks, judges their end and requeues."""
