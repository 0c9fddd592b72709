"""Results of many runs: one HDF5 file, tidy frames, and statistics over seeds (docs/results.md)."""
