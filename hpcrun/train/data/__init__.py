"""Batches for each rank: sample order, streams, loader processes, micro-batches."""
