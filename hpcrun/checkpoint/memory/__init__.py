"""Copies of the last saves in the memory of the nodes, from which a restart in the same job restores.

``buffers`` holds the snapshots. ``peers`` sends files between nodes, and presents all files as a file system:
the restore from memory is the restore from disk with another root, so it has the same index, manifest, hashes
and agreement of the ranks. ``copies`` decides what is kept and restored.
"""
