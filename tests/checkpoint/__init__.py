"""Tests of hpcrun.checkpoint, with a crash at every system call."""
