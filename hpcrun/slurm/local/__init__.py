"""The local cluster: Slurm's job control with processes of this machine."""
