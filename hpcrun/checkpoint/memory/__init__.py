"""Copies of the last saves in the memory of the nodes, from which a restart in the same job restores.

``files`` presents them as a file system, so that the restore from memory is the restore from disk with
another root: the same index, manifest, hashes and agreement of the ranks. ``buffers`` holds the snapshots,
``peers`` sends files between nodes, and ``copies`` decides what is kept and restored.
"""
