"""The process group and the parallel strategies: DDP, FSDP, and the checks of both."""
