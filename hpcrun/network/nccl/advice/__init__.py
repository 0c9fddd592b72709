"""Settings of NCCL for a machine, and the ways to print them."""
