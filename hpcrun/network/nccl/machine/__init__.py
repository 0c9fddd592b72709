"""Facts about a machine that NCCL's settings depend on: GPUs, network adapters, links."""
