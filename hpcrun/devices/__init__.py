"""The accelerators, CPU cores and threads of a node. No other package names CUDA."""
