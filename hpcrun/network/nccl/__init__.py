"""NCCL's environment: what a variable means, what is wrong with a setting, and what a node needs."""
