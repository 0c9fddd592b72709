"""Checks of NCCL's variables in an environment and in scripts."""
