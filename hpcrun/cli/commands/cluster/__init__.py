"""Commands that check nodes, the network and NCCL."""
