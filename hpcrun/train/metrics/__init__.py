"""Metrics: losses, timing, model FLOP/s utilization, profiles, and where they are written."""
