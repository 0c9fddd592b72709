"""Saving and restoring the state of a training run.

``storage`` holds the commit protocol and imports no torch, ``state`` chooses the state that is saved, and
``sharded`` writes and reads it on all ranks. This module imports nothing, so that a command which only
lists checkpoints does not import torch.
"""
