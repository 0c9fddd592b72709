"""Exact resume for training loops that are not hpcrun's: plain PyTorch, and frameworks."""
