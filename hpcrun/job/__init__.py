"""A Slurm job from its first line to its exit code: ranks, end of an attempt, decision, requeue."""
