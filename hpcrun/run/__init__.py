"""The run directory: the only state a run has. Its paths, its record, its event log, its owner."""
