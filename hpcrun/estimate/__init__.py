"""Estimate the memory of a rank from a run on fake tensors, which have shapes but no data."""
