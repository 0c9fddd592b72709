"""The CPU cores, GPUs and threads of a node."""
