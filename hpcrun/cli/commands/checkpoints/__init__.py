"""Commands that read the checkpoints of a run."""
