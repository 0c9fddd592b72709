"""Commands that batch scripts and the local cluster call."""
