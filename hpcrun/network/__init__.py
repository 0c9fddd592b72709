"""The network under a training: NCCL advice and lint, and checks of the links between nodes."""
