"""Submission to Slurm: batch scripts, options of sbatch, job arrays, and the executor."""
