"""The run directory, which is the only state of a run: paths, record, event log, owner."""
